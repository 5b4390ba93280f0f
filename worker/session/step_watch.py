"""Detects an optimizer that steps a distributed model's dense side while the gradients of its rows wait.

    loss.backward() ── rows' gradients are staged ── dense.step() ── the hook: lookups with gradient are refused
                                                 └── session.step(dense), discard() ── all is in order

torch calls one hook of this process after every optimizer's step. Unless gradients wait, the hook reads one number.

Invariants:
 1. A step that the session itself makes is never noted.
 2. A note ends with the step: by ``session.step``, ``discard``, or ``zero_grad`` of a wrapped optimizer.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...cpp_ext import _client
from .forgotten_optimizer import ForgottenOptimizer

_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()


class StepWatch:
    """Watches the optimizers of this process on behalf of one session.

    Args:
        native: the native half of the session, whose lookups are refused after a step that bypassed the session.
    """

    def __init__(self, native: _client.NativeSession) -> None:
        self._native = native
        self._process = os.getpid()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._is_stepping = False
        self._forgotten = ForgottenOptimizer()
        self._empty_steps = 0
        _watches.add(self)

    def add_model(self, model: nn.Module) -> None:
        """Watches optimizers that hold parameters of this model; the model is not kept alive."""
        self._models.add(model)

    @contextmanager
    def stepping(self, dense: torch.optim.Optimizer | None) -> Iterator[None]:
        """Marks optimizer steps in the body as the session's own.

        Args:
            dense: the optimizer that the session steps; its parameters are watched from now on. None: none.
        """
        if dense is not None:
            self._optimizers.add(dense)
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def look_for_forgotten(self, dense: torch.optim.Optimizer | None, *, stacklevel: int) -> None:
        """Warns, once a session, when dense weights have gradients and no optimizer was ever given for them.

        Args:
            dense: the optimizer that the session steps; that of another model counts as none. None: none.
            stacklevel: the frame that the warning names; 1 is the caller of this method.
        """
        if not self._forgotten.is_looking:
            return
        models = tuple(self._models)
        if dense is not None and self._is_of(dense, models):
            self._forgotten.end()
        else:
            self._forgotten.look(models, is_given=dense is not None, stacklevel=stacklevel + 1)

    @staticmethod
    def _is_of(dense: torch.optim.Optimizer, models: tuple[nn.Module, ...]) -> bool:
        """Whether an optimizer has a weight of a model, or no model has weights beside its tables."""
        own = {id(weight) for model in models for weight in model.parameters() if weight.numel() > 0}
        return not own or any(id(weight) in own for weight in _parameters(dense))

    def note_empty(self) -> None:
        """Notes that a step had gradients of no row."""
        self._empty_steps += 1

    def warn_of_empty(self, *, stacklevel: int) -> None:
        """Warns, once a session, of a step that had gradients of no row.

        Args:
            stacklevel: the frame that the warning names; 1 is the caller of this method.
        """
        if self._empty_steps == 1:
            self._empty_steps += 1
            warnings.warn(
                "session.step: this step has no gradient of any row, as for an empty batch, or for ids that are all "
                "padding; such a step only counts. Leave empty batches out, or pass allow_empty=True",
                UserWarning,
                stacklevel=stacklevel + 1,
            )

    def close(self) -> None:
        """Ends the watch."""
        _watches.discard(self)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses lookups from now on if this optimizer has just stepped in place of the session."""
        if self._is_stepping or os.getpid() != self._process:
            return
        self._forgotten.end()  # a loop that steps an optimizer itself has not forgotten it
        staged = self._native.staged_calls
        if staged == 0 or self._native.lookup_refusal or not self._is_concerned(optimizer):
            return
        self._native.refuse_lookups(
            f"{type(optimizer).__name__}.step() moved the dense parameters of a distributed model, but the gradients "
            f"of its rows ({staged} calls of backward) were not sent: call session.step(optimizer) in its place; a "
            "loop that calls optimizer.step() itself needs session.wrap(optimizer); session.discard() drops them"
        )

    def _is_concerned(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether ``optimizer`` holds a watched parameter: of a model, or of an optimizer the session stepped.

        When there are none, because only embeddings were distributed, every optimizer with a gradient counts.
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
