"""Merges the lookups of a forward into one pull and one op, with a plan that is learnt from the first batch.

The first forward after ``distribute`` is traced. Each lookup's ids are matched by memory to a tensor of the batch: the
tensor itself, or one index or range of one of its dimensions. Views and casts are matched too (id_expressions.py).
From then on a hook pulls the rows for the batch's tensors before the forward begins, with one frame per shard for all
tables, and rows_ahead.py makes the rows of those lookups that train. Where these are all lookups, its op pulls the rows
too. Results do not depend on the plan: a lookup that finds rows missing pulls them itself and is counted. The next
forward is then traced again, a bounded number of times.
These hooks do nothing in a compiled model, whose graphs have their lookups merged (compiled_lookups.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...cpp_ext import _client
from ..data.batch_tensors import id_tensors
from ..id_trace.forward_trace import ForwardTrace
from ..id_trace.id_expressions import Expression, IdSources, Root, TracedIds, descriptions
from ..session.session import Session
from .current_forward import Forward, begin_forward, end_forward
from .eval_warning import EvalWarning
from .frozen_layers import FrozenLayers
from .handed_rows import SameBatch
from .joint_lookups import JointLookups
from .rows_ahead import LookupRecord, RowsAhead

_MAX_TRACES = 8
_FORWARDS_PER_MISS = 10  # with misses more often than this, the last trace uses only the batch's own tensors


class ForwardPull:
    """The forward hooks of one distributed model, which pull rows for all lookups at once.

    Copies of the model share this object. A pickled copy has hooks that do nothing.

    Args:
        session: the session whose tables the model reads.
        same_batch: the comparison of batches over the tensor group; None: there is no group.
    """

    def __init__(self, session: Session, same_batch: SameBatch | None) -> None:
        self._native = session.core.native
        self._joint = JointLookups(session, same_batch, lambda: self._is_to_trace)
        self._group = session.core.tensor_group
        self._on_device = session.core.on_device
        self._watch_model = session.core.watch_model
        self._requests = session.core.trace_requests
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._eval_warning = EvalWarning()
        self._frozen = FrozenLayers(session.core.set_frozen)
        self._sources: IdSources | None = None
        self._ahead: RowsAhead | None = None
        self._forward: _TracedForward | None = None
        self._traces = 0
        self._forwards_ahead = 0
        self._forwards_missed = 0
        self._missed_before = 0

    def install(self, model: nn.Module) -> None:
        """Adds the hooks to the root module of the model."""
        self._watch(model)
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardPull:
        return self

    def __reduce__(self) -> tuple[type[_NoMergedPull], tuple[()]]:
        return _NoMergedPull, ()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Is the hook before a forward: pulls by the plan, or begins a trace when there is no plan yet."""
        if torch.compiler.is_compiling():
            return
        self._watch(module)
        self._frozen.look_at(module)
        if module.training and torch.is_grad_enabled():
            self._eval_warning.look_at(module)
        batch = (args, kwargs)
        sources, made = self._sources, None
        if sources is not None and sources.plan.size > 0:
            with nullcontext() if self._group is None else suppress(Exception):  # a lookup fails then, and tells them
                made = self._pull_by(sources, batch, train=module.training)
        arguments: ForwardTrace | None = None
        if self._is_to_trace:
            self._begin_trace(batch)
            forward = self._forward
            is_traced = forward is not None and forward.arguments.is_of_this_thread
            made, arguments = (forward.record, forward.arguments) if forward is not None and is_traced else (None, None)
        begin_forward(module, made, self._joint.begin(batch, arguments))

    @property
    def _is_to_trace(self) -> bool:
        """Whether the forward that begins is to be traced."""
        return self._sources is None or self._requests.is_any or self._joint.wants_trace

    def _pull_by(self, sources: IdSources, batch: Any, *, train: bool) -> Forward | None:
        """Pulls what the batch's lookups need; where the model is on a device, sends their rows there in one copy.

        Returns the rows that were made for the layers; None where each of them makes its own.
        """
        step, with_gradient = self._on_device, torch.is_grad_enabled()
        tensors = sources.tensors(batch, step.copy_on_host) if step.is_used else sources.tensors(batch)
        ahead = self._ahead if train else None
        if ahead is not None and not step.is_used:
            made = ahead.pull_and_make(self._native, tensors)
            if made is not None:
                return made
        roots = descriptions(tensors)
        self._native.pull_merged(sources.plan, roots, train, with_gradient=with_gradient)
        if step.is_used and not step.is_prefetched and (with_gradient or not train):
            step.send_and_offer(self._native.pack_merged(sources.plan, roots, train), train=train)
        return None if ahead is None else ahead.make(tensors, batch)

    def _begin_trace(self, batch: Any) -> None:
        """Begins the trace of a forward, unless a forward of another thread is being traced.

        A trace that an interrupted forward of this thread has left open is ended first.
        """
        if self._forward is not None:
            if not self._forward.arguments.is_of_this_thread:
                return
            self._forward.arguments.leave()
        self._forward = _TracedForward(self._native, batch)

    def _watch(self, model: nn.Module) -> None:
        """Has the session watch ``model``, which may be a copy of the model that the hooks were installed on."""
        if model not in self._watched:
            self._watched.add(model)
            self._watch_model(model)
            self._frozen.watch(model)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Is the hook after a forward: ends a trace, or counts lookups that the plan has missed."""
        del output
        if torch.compiler.is_compiling():
            return
        self._joint.end(end_forward(module), (args, kwargs))
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
            self._on_device.end_evaluation()

    def _learn(self, forward: _TracedForward, traced: list[TracedIds]) -> None:
        self._traces += 1
        is_poor = self._forwards_missed * _FORWARDS_PER_MISS > self._forwards_ahead
        if self._traces == _MAX_TRACES and is_poor:
            traced = []
        self._sources, self._ahead = forward.learnt(traced, lambda: self._native.step)
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
    """A forward whose lookups are traced from the construction of this object on."""

    def __init__(self, native: _client.NativeSession, batch: Any) -> None:
        self._batch = batch
        self._ids: list[tuple[Expression, Tensor]] = [(Root(path), tensor) for path, tensor in id_tensors(batch)]
        self._lookups, self.record = native.start_trace(), LookupRecord()
        self.arguments = ForwardTrace(batch)
        self.arguments.__enter__()

    def learnt(self, traced: list[TracedIds], step_of: Callable[[], int]) -> tuple[IdSources, RowsAhead]:
        """Returns the plan of ids to pull ahead, and the plan of rows to make ahead.

        Ids in the batch's memory come first, then ids computed from it.
        """
        pairs = [*self._ids, *((found.expression, found.ids) for found in traced)]
        sources = IdSources(self._lookups, pairs)
        return sources, RowsAhead(self.record.calls, sources, [tensor for _, tensor in pairs], self._batch, step_of)


class _NoMergedPull:
    """Replaces the hooks in a pickled copy of a model; its hooks do nothing."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Does nothing."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Does nothing."""
