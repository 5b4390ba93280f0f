"""One pull for all lookups of a forward, learnt from the first batch.

The first forward after ``distribute`` is traced: each lookup's tensor is matched by memory to a tensor of the batch
(the very tensor, or one index or range of one of its dimensions), or is a view or a cast of one (id_expressions.py).
From then on a hook pulls what the batch's tensors will need before the forward begins, one frame per shard for all
tables. Nothing depends on the guess: a lookup that finds rows missing pulls them itself and is counted, and the next
forward is traced anew, a bounded number of times.
Inside ``torch.compile`` hooks are not traced, and a compiled model pulls per lookup.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ...cpp_ext import _client
from ..data.batch_tensors import id_tensors
from ..id_trace.forward_trace import ForwardTrace
from ..id_trace.id_expressions import Expression, IdSources, Root, TracedIds, descriptions
from ..session.session import Session

_MAX_TRACES = 8
_FORWARDS_PER_MISS = 10  # with more misses the last trace takes the batch's own tensors alone


class ForwardPull:
    """The hooks of one distributed model. Copies of the model share it; a pickled copy has none."""

    def __init__(self, session: Session) -> None:
        self._native = session.core.native
        self._watch_model = session.core.watch_model
        self._requests = session.core.trace_requests
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._sources: IdSources | None = None
        self._forward: _TracedForward | None = None
        self._traces = 0
        self._forwards_ahead = 0
        self._forwards_missed = 0
        self._missed_before = 0

    def install(self, model: nn.Module) -> None:
        """Adds the hooks to the model's root."""
        self._watch(model)
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardPull:
        return self

    def __reduce__(self) -> tuple[type[_NoMergedPull], tuple[()]]:
        return _NoMergedPull, ()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pulls ahead, or begins a trace."""
        if torch.compiler.is_compiling():
            return
        self._watch(module)
        batch = (args, kwargs)
        sources = self._sources
        if sources is not None and sources.plan.size > 0:
            tensors = sources.tensors(batch, None)
            self._native.pull_merged(
                sources.plan, descriptions(tensors), module.training, with_gradient=torch.is_grad_enabled()
            )
        if sources is None or self._requests.is_any:
            self._begin_trace(batch)

    def _begin_trace(self, batch: Any) -> None:
        """Nothing while another thread's forward is traced; a forward that was interrupted left its trace behind."""
        if self._forward is not None:
            if not self._forward.arguments.is_of_this_thread:
                return
            self._forward.arguments.leave()
        self._forward = _TracedForward(self._native, batch)

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
        forward = self._forward
        if forward is not None and forward.arguments.is_of_this_thread:
            self._forward = None
            traced = forward.arguments.leave()
            self._requests.tell(traced)
            if self._sources is None:
                self._learn(forward, traced)
                return
        if module.training:
            self._count_misses()
        else:
            self._native.end_evaluation()

    def _learn(self, forward: _TracedForward, traced: list[TracedIds]) -> None:
        self._traces += 1
        is_poor = self._forwards_missed * _FORWARDS_PER_MISS > self._forwards_ahead
        if self._traces == _MAX_TRACES and is_poor:
            traced = []
        self._sources = forward.sources(traced)
        self._missed_before = self._native.lookups_missed

    def _count_misses(self) -> None:
        missed = self._native.lookups_missed
        self._forwards_ahead += 1
        if missed > self._missed_before:
            self._forwards_missed += 1
            if self._traces < _MAX_TRACES:
                self._sources = None
        self._missed_before = missed


class _TracedForward:
    """One forward whose lookups are traced from here on."""

    def __init__(self, native: _client.NativeSession, batch: Any) -> None:
        self._ids: list[tuple[Expression, Tensor]] = [(Root(path), tensor) for path, tensor in id_tensors(batch)]
        self._lookups = native.start_trace()
        self.arguments = ForwardTrace(batch)
        self.arguments.__enter__()

    def sources(self, traced: list[TracedIds]) -> IdSources:
        """What to pull ahead: ids in the batch's own memory first, then those that are made of it."""
        return IdSources(self._lookups, [*self._ids, *((found.expression, found.ids) for found in traced)])


class _NoMergedPull:
    """Stands for the hooks in a pickled copy of a model."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nothing."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Nothing."""
