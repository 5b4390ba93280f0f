"""Notices an optimizer that moves a distributed model's dense side while the gradients of its rows wait.

    loss.backward() ── rows' gradients are staged ── dense.step() ── the hook: lookups with gradient are refused
                                                 └── session.step(dense), discard() ── all is in order

torch calls one hook of this process after every optimizer's step. It costs a look at one number unless gradients wait.

Invariants:
 1. A step that the session itself makes is never noted.
 2. A note ends with the step: by ``session.step``, ``discard``, or ``zero_grad`` of a wrapped optimizer.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...cpp_ext import _client

_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()


class StepWatch:
    """What one session knows of the optimizers around it.

    Args:
        native: whose lookups are refused.
    """

    def __init__(self, native: _client.NativeSession) -> None:
        self._native = native
        self._process = os.getpid()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._is_stepping = False
        _watches.add(self)

    def add_model(self, model: nn.Module) -> None:
        """Counts optimizers of this model's parameters as the session's business; the model is not kept alive."""
        self._models.add(model)

    @contextmanager
    def stepping(self, dense: torch.optim.Optimizer | None) -> Iterator[None]:
        """Steps of optimizers within are the session's own; ``dense`` counts as one of its models' from now on."""
        if dense is not None:
            self._optimizers.add(dense)
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def close(self) -> None:
        """Ends the watch."""
        _watches.discard(self)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Has lookups refused when this optimizer's step was made in place of the session's."""
        if self._is_stepping or os.getpid() != self._process:
            return
        staged = self._native.staged_calls
        if staged == 0 or self._native.lookup_refusal or not self._is_concerned(optimizer):
            return
        self._native.refuse_lookups(
            f"{type(optimizer).__name__}.step() moved the dense parameters of a distributed model, but the gradients "
            f"of its rows ({staged} calls of backward) were not sent: call session.step(optimizer) in its place; a "
            "loop that calls optimizer.step() by itself takes session.wrap(optimizer); session.discard() drops them"
        )

    def _is_concerned(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it holds a parameter of one of the models, or of an optimizer that the session has stepped.

        Where neither has any, as when embeddings alone were distributed, each optimizer with a gradient counts.
        """
        known = {id(parameter) for model in tuple(self._models) for parameter in model.parameters()}
        known.update(id(parameter) for given in tuple(self._optimizers) for parameter in _parameters(given))
        if not known:
            return any(parameter.grad is not None for parameter in _parameters(optimizer))
        return any(id(parameter) in known for parameter in _parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    for watch in tuple(_watches):
        watch.note(optimizer)


register_optimizer_step_post_hook(_after_step)
