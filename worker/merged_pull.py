"""One pull for all lookups of a forward, learnt from the first batch.

The first forward after ``distribute`` is traced: each lookup's tensor is matched by memory to a tensor of the batch
(the very tensor, or one index or range of one of its dimensions). From then on a hook pulls what the batch's tensors
will need before the forward begins, one frame per shard for all tables. Nothing depends on the guess: a lookup that
finds rows missing pulls them itself and is counted, and the next forward is traced anew, a bounded number of times.
Inside ``torch.compile`` hooks are not traced, and a compiled model pulls per lookup.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..cpp_ext import _client
from .batch_tensors import Path, description, id_tensors, on_host, tensor_at
from .session import Session

_MAX_TRACES = 8


class MergedPull:
    """The hooks of one distributed model. Copies of the model share it; a pickled copy has none."""

    def __init__(self, session: Session) -> None:
        self._native = session.native
        self._watch_model = session.watch_model
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._plan: _client.MergePlan | None = None
        self._paths: list[Path] = []
        self._traced: list[Tensor] = []
        self._trace: _client.LookupTrace | None = None
        self._traces = 0
        self._missed_before = 0

    def install(self, model: nn.Module) -> None:
        """Adds the hooks to the model's root."""
        self._watch(model)
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> MergedPull:
        return self

    def __reduce__(self) -> tuple[type[_NoMergedPull], tuple[()]]:
        return _NoMergedPull, ()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pulls ahead, or begins a trace."""
        if torch.compiler.is_compiling():
            return
        self._watch(module)
        if self._plan is None:
            found = dict(id_tensors((args, kwargs), ()))
            self._paths, self._traced = list(found), list(found.values())
            self._trace = self._native.start_trace()
        elif self._plan.size > 0:
            tensors = [tensor_at((args, kwargs), path) for path in self._paths]
            hosts = [None if tensor is None else on_host(tensor) for tensor in tensors]
            roots = [description(tensor, host) for tensor, host in zip(tensors, hosts, strict=True)]
            self._native.pull_merged(self._plan, roots, module.training, with_gradient=torch.is_grad_enabled())

    def _watch(self, model: nn.Module) -> None:
        """Copies of the model have these hooks as well."""
        if model not in self._watched:
            self._watched.add(model)
            self._watch_model(model)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Ends a trace, or looks whether the guess was right."""
        del args, kwargs, output
        if torch.compiler.is_compiling():
            return
        if self._trace is not None:
            trace, self._trace = self._trace, None
            self._traces += 1
            self._plan = _client.learn_merge(trace, [description(tensor, tensor) for tensor in self._traced])
            self._traced = []
            self._missed_before = self._native.lookups_missed
        elif module.training:
            missed = self._native.lookups_missed
            if missed > self._missed_before and self._traces < _MAX_TRACES:
                self._plan = None
            self._missed_before = missed
        else:
            self._native.end_evaluation()


class _NoMergedPull:
    """Stands for the hooks in a pickled copy of a model."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nothing."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Nothing."""
