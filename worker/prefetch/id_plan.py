"""Plans which ids of a batch reach which lookup: the user names them, or they are learnt from a forward."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...cpp_ext import _client
from ...proto.errors import not_allowed
from ..data.batch_tensors import Description, description, id_tensors, on_host
from ..lookups.expressions import Expression, Fixed, Root, TracedIds
from ..lookups.parts import memory_of
from ..lookups.plan import LookupPlan, descriptions
from ..lookups.record import ids_of
from ..session.trace_requests import TracedForwards, TraceRequests
from .loop_batch import in_batch

_log = logging.getLogger(__name__)

IdsOf: TypeAlias = Callable[[Any], Mapping[str, Any]]
# A plan, and the tensors of one batch to which it refers.
Guess: TypeAlias = tuple[_client.PlannedIds, list[Description]]

_MAX_TRACES = 8


class IdPlan(Protocol):
    """The plan of one prefetch. The dedup thread calls ``guess``; the training thread calls the other methods."""

    def guess(self, number: int, batch: Any) -> tuple[Guess | None, Any]:
        """Returns the ids of a batch, and an object to keep alive until they were read.

        Args:
            number: the number of the batch in this pass, from 0.
            batch: the batch as the loader gave it.
        """
        ...

    def begin(self, batch: Any) -> None:
        """Is called when the training loop gets this batch."""
        ...

    def end(self) -> None:
        """Is called when the training loop is done with the batch, or the pass is over. Wakes a waiting ``guess``."""
        ...


class NamedIds:
    """A plan by the user's function ``ids=fn``.

    Args:
        ids_of: the function: batch -> {table: ids}; ids are an integer tensor of any shape, or a sequence of them.
        namespace: the namespace of the tables.
        known: names of the tables that a model of this process uses.
    """

    def __init__(self, ids_of: IdsOf, namespace: str, known: frozenset[str]) -> None:
        self._ids_of, self._prefix, self._known = ids_of, f"{namespace}/", known

    def guess(self, number: int, batch: Any) -> tuple[Guess | None, Any]:
        """Implements :meth:`IdPlan.guess`.

        Raises:
            InvalidArgument: the function names a table that the model does not have, or ids that are not integers.
        """
        del number
        names: list[str] = []
        pairs: list[tuple[Tensor, Tensor | None]] = []
        for name, ids in self._ids_of(batch).items():
            table = name.removeprefix(self._prefix)
            if table not in self._known:
                raise not_allowed("prefetch.ids", name, sorted(self._known))
            for tensor in _tensors(name, ids):
                names.append(self._prefix + table)
                pairs.append((tensor, on_host(tensor)))
        wholes = [(name, index, "whole", 0, 0, 0) for index, name in enumerate(names)]
        return (_client.PlannedIds(wholes), [description(seen, copy) for seen, copy in pairs]), pairs

    def begin(self, batch: Any) -> None:
        """Does nothing: there is nothing to learn."""

    def end(self) -> None:
        """Does nothing: there is nothing to learn."""


class NoIds:
    """A plan that pulls nothing ahead, for a rank that gets its rows from the leader of its tensor group."""

    def guess(self, number: int, batch: Any) -> tuple[Guess | None, Any]:
        """Implements :meth:`IdPlan.guess`."""
        del number, batch
        return None, None

    def begin(self, batch: Any) -> None:
        """Does nothing: there is nothing to learn."""

    def end(self) -> None:
        """Does nothing: there is nothing to learn."""


def _tensors(name: str, ids: Any) -> list[Tensor]:
    parts = ids if isinstance(ids, tuple | list) and not all(isinstance(i, int) for i in ids) else [ids]
    tensors = [part if isinstance(part, Tensor) else torch.from_numpy(np.asarray(part)) for part in parts]
    for tensor in tensors:
        if tensor.dtype not in (torch.int64, torch.int32):
            raise not_allowed(f"prefetch.ids[{name!r}]: dtype", str(tensor.dtype), "int64, int32")
    return [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]


class LearntIds:
    """A plan that is learnt from the first forward.

    A lookup's ids are matched by memory to a tensor of the batch, or to an index or range of one. Other ids are traced
    through the model's forward. They must be views, casts or arithmetic with constants of an argument that is in the
    batch, or that the loop made of the batch by ``to``. Or they are those of the rows of a dense tower, which every
    batch has. When later lookups find rows missing, the plan is learnt again,
    a bounded number of times.

    Args:
        native: the native half of the session.
        requests: the session's requests to trace forwards.
        fixed: the ids that every batch has; None: there are none.
    """

    def __init__(
        self, native: _client.NativeSession, requests: TraceRequests[TracedIds], fixed: Tensor | None = None
    ) -> None:
        self._native, self._requests = native, requests
        self._fixed: list[tuple[Expression, Tensor]] = [] if fixed is None else [(Fixed(fixed), fixed)]
        self._known = threading.Event()
        self._plan: LookupPlan | None = None
        self._is_wrong = False
        self._trace: _client.LookupTrace | None = None
        self._forwards: TracedForwards[TracedIds] | None = None
        self._traced: Any = None
        self._traces = 0
        self._missed = 0

    def guess(self, number: int, batch: Any) -> tuple[Guess | None, Any]:
        """Implements :meth:`IdPlan.guess`. The first batch has no plan; the second one waits until there is a plan."""
        if number > 0:
            self._known.wait()
        plan = self._plan
        if plan is None or not plan.parts:
            return None, None
        tensors = plan.tensors(batch)
        return (plan.native, descriptions(tensors)), tensors

    def begin(self, batch: Any) -> None:
        """Traces the forward of this batch when there is no plan, or lookups have missed with the present one."""
        self._missed = self._native.lookups_missed
        if (self._plan is None or self._is_wrong) and self._traces < _MAX_TRACES:
            self._traced = batch
            self._trace = self._native.start_trace()
            self._forwards = self._requests.add()

    def end(self) -> None:
        """Learns from the trace, if there was one. After a miss, the next batch is traced."""
        trace, self._trace = self._trace, None
        if trace is not None:
            self._traces += 1
            self._learn(trace)
        elif self._native.lookups_missed > self._missed:
            self._is_wrong = True
        self._known.set()

    def _learn(self, trace: _client.LookupTrace) -> None:
        batch, self._traced = self._traced, None
        forwards, self._forwards = self._forwards, None
        traced = [] if forwards is None else in_batch(forwards.traced, batch)
        of_batch = ((Root(path), tensor) for path, tensor in id_tensors(batch))
        known = [(expression, memory_of(ids)) for expression, ids in (*of_batch, *traced, *self._fixed)]
        ids, unknown = ids_of(trace, known)
        if not ids and not unknown:
            return
        self._plan, self._is_wrong = LookupPlan([], ids), False
        if unknown and self._traces == 1:
            _log.warning(
                "prefetch: lookups of %s use ids that are no views, casts or arithmetic of a tensor of the batch; "
                "their rows are pulled when they are used; name them with ids=fn(batch)",
                ", ".join(sorted(set(unknown))),
            )
