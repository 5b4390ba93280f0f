"""Makes the rows of a forward's lookups before it begins, by a plan that is learnt from the first batch.

The first forward after ``distribute`` is traced (trace.py), and the plan is learnt from it (record.py). From then on a
hook has rows of all planned lookups made before the forward, and the layers take them (made_rows.py). A lookup that
finds rows missing pulls them itself and is counted. The next forward is then traced again, a bounded number of times.
These hooks do nothing in a compiled model, whose graphs have their lookups merged (layers/compiled_lookups.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import nn

from ..session.session import JobSession
from .expressions import TracedIds
from .layer_watch import LayerWatch
from .made_rows import MadeRows, begin_forward, end_forward
from .plan import LookupPlan
from .record import ForwardRecord

_MAX_TRACES = 8
_FORWARDS_PER_MISS = 10  # with misses more often than this, the last trace uses only the batch's own tensors


class OwnMaker(Protocol):
    """Makes the rows of lookups that this rank makes itself."""

    def learn(self, plan: LookupPlan) -> None:
        """Makes rows by a plan from now on."""

    def make(self, batch: Any, *, train: bool) -> MadeRows | None:
        """Pulls what a batch's lookups need; returns the rows of them, or None where each layer makes its own."""


class JointMaker(Protocol):
    """Makes the rows of lookups that ranks make together."""

    is_to_trace: Callable[[], bool]

    @property
    def wants_trace(self) -> bool:
        """Whether the next forward is to be traced."""

    def make(self, batch: Any) -> MadeRows | None:
        """Makes the lookups of a forward; returns None where no lookup is joint."""

    def end(self, made: MadeRows | None, plan: LookupPlan | None, batch: Any) -> None:
        """Ends a forward for which ``make`` returned this; its plan is None where it was not recorded."""


class ForwardHook:
    """The forward hooks of one distributed model.

    Copies of the model share this object. A pickled copy has hooks that do nothing.

    Args:
        session: the session whose tables the model reads.
        own: makes rows of lookups that this rank makes itself.
        joint: makes rows of lookups that ranks make together.
    """

    def __init__(self, session: JobSession, own: OwnMaker, joint: JointMaker) -> None:
        self._native, self._own, self._joint = session.core.native, own, joint
        joint.is_to_trace = lambda: self._is_to_trace
        self._has_group = session.core.tensor_group is not None
        self._on_device = session.core.on_device
        self._watch_model = session.core.watch_model
        self._requests = session.core.trace_requests
        self._pending = self._requests.pending
        self._layers = LayerWatch(session.core.set_frozen)
        self._record: ForwardRecord | None = None
        self._has_plan = False
        self._traces = 0
        self._forwards_ahead = 0
        self._forwards_missed = 0
        self._missed_before = 0

    def install(self, model: nn.Module) -> None:
        """Adds the hooks to the root module of the model."""
        self._watch(model)
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHook:
        return self

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Is the hook before a forward: has rows made by the plan, or begins a trace when there is no plan yet."""
        if _is_passed_over():
            return
        self._watch(module)
        self._layers.look_at(module)
        if module.training and torch.is_grad_enabled():
            self._layers.warn_of_eval(module)
        batch, own = (args, kwargs), None
        # A requester of traces records from before this forward, and would take the plan's lookups for those of layers.
        if self._has_plan and not len(self._pending):
            with suppress(Exception) if self._has_group else nullcontext():  # a failing lookup then notifies the group
                own = self._own.make(batch, train=module.training)
        record = self._begin_record(batch) if self._is_to_trace else None
        begin_forward(module, record, own if record is None else None, self._joint.make(batch))

    @property
    def _is_to_trace(self) -> bool:
        """Whether the forward that begins is to be traced."""
        return not self._has_plan or self._requests.is_any or self._joint.wants_trace

    def _begin_record(self, batch: Any) -> ForwardRecord | None:
        """Begins the record of a forward; returns None where a forward of another thread is being recorded.

        A record that an interrupted forward of this thread has left open is ended first.
        """
        if self._record is not None:
            if not self._record.is_of_this_thread:
                return None
            self._record.leave()
        self._record = ForwardRecord(batch, self._native.start_trace())
        return self._record

    def _watch(self, model: nn.Module) -> None:
        """Has the session watch ``model``, which may be a copy of the model that the hooks were installed on."""
        if not self._layers.watches(model):
            self._watch_model(model)
            self._layers.watch(model)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Is the hook after a forward: learns from a traced one, or counts lookups that the plan has missed."""
        del output
        if _is_passed_over():
            return
        joint, record, plan = end_forward(module), self._record, None
        if record is not None and record.is_of_this_thread:
            self._record = None
            traced = record.leave()
            self._requests.record(traced)
            plan = record.plan(traced if self._has_plan else self._trusted(traced))
        self._joint.end(joint, plan, (args, kwargs))
        if plan is not None and not self._has_plan:
            self._own.learn(plan)
            self._has_plan, self._missed_before = True, self._native.lookups_missed
        elif module.training:
            self._count_misses()
        else:
            self._native.end_evaluation()
            self._on_device.end_evaluation()

    def _trusted(self, traced: list[TracedIds]) -> list[TracedIds]:
        """Returns the ids to make a plan of: none but the batch's own tensors after many misses."""
        self._traces += 1
        is_poor = self._forwards_missed * _FORWARDS_PER_MISS > self._forwards_ahead
        return [] if self._traces == _MAX_TRACES and is_poor else traced

    def _count_misses(self) -> None:
        missed = self._native.lookups_missed
        self._forwards_ahead += 1
        if missed > self._missed_before:
            self._forwards_missed += 1
            if self._traces < _MAX_TRACES:
                self._has_plan = False
        self._missed_before = missed


def _is_passed_over() -> bool:
    """Whether a graph is compiled, or a transform of torch.func runs, whose tensors have no memory and which layers
    refuse by name.
    """
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


class _NoHook:
    """Replaces the hooks in a pickled copy of a model; its hooks do nothing."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Does nothing."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Does nothing."""
