"""Which ids of a batch reach which lookup: named by the author, or learnt from a forward."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...cpp_ext import _client
from ...proto.errors import InvalidArgument
from ..data.batch_tensors import Description, description, id_tensors
from ..id_trace.forward_trace import TracedForwards, TraceRequests
from ..id_trace.id_expressions import IdSources, Root, descriptions, in_batch

_log = logging.getLogger(__name__)

IdsOf: TypeAlias = Callable[[Any], Mapping[str, Any]]
# A plan and the tensors of one batch that it speaks of.
Guess: TypeAlias = tuple[_client.MergePlan, list[Description]]

_MAX_TRACES = 8


class IdPlan(Protocol):
    """One per prefetch. ``guess`` is called by the thread that dedups, the rest by the one that trains."""

    def guess(self, number: int, batch: Any, host: Any) -> tuple[Guess | None, Any]:
        """The ids of batch ``number`` of this pass, and what must be kept alive until they were read.

        Args:
            number: from 0.
            batch: as the training loop will see it.
            host: the same on the host.
        """
        ...

    def begin(self, batch: Any) -> None:
        """The training loop gets this batch now."""
        ...

    def end(self) -> None:
        """The pass is done with the batch, or over; a call that waits in ``guess`` goes on."""
        ...


class NamedIds:
    """``ids=fn`` of the author.

    Args:
        ids_of: batch -> {table: ids}, ids an integer tensor of any shape, or a sequence of such.
        namespace: of the tables.
        known: names of the tables that a model of this process uses.
    """

    def __init__(self, ids_of: IdsOf, namespace: str, known: frozenset[str]) -> None:
        self._ids_of, self._prefix, self._known = ids_of, f"{namespace}/", known

    def guess(self, number: int, batch: Any, host: Any) -> tuple[Guess | None, Any]:
        """See :class:`IdPlan`.

        Raises:
            InvalidArgument: a name that is no table of the model, or ids that are no integers.
        """
        del number
        names: list[str] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        named = self._ids_of(batch)
        on_host = named if host is batch else self._ids_of(host)
        for name, ids in named.items():
            table = name.removeprefix(self._prefix)
            if table not in self._known:
                raise InvalidArgument(
                    f"prefetch.ids: table {name!r} is not allowed; allowed: {', '.join(sorted(self._known))}"
                )
            for seen, copy in zip(_tensors(name, ids), _tensors(name, on_host[name]), strict=True):
                names.append(self._prefix + table)
                pairs.append((seen, copy))
        return (_client.MergePlan(names), [description(seen, copy) for seen, copy in pairs]), pairs

    def begin(self, batch: Any) -> None:
        """Nothing to learn."""

    def end(self) -> None:
        """Nothing to learn."""


def _tensors(name: str, ids: Any) -> list[Tensor]:
    parts = ids if isinstance(ids, tuple | list) and not all(isinstance(i, int) for i in ids) else [ids]
    tensors = [part if isinstance(part, Tensor) else torch.from_numpy(np.asarray(part)) for part in parts]
    for tensor in tensors:
        if tensor.dtype not in (torch.int64, torch.int32):
            raise InvalidArgument(f"prefetch.ids[{name!r}]: dtype {tensor.dtype} is not allowed; allowed: int64, int32")
    return [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]


class LearntIds:
    """Learns from the first forward: a lookup's tensor is one of the batch's by memory, or an index or range of one.

    What is none of these is sought through the model's forward: views and casts of an argument that is in the batch,
    or that the loop made of the batch by ``to``. Lookups that find rows missing later make it learn anew, a bounded
    number of times.

    Args:
        native: of the session.
        requests: of the session.
    """

    def __init__(self, native: _client.NativeSession, requests: TraceRequests) -> None:
        self._native, self._requests = native, requests
        self._known = threading.Event()
        self._sources: IdSources | None = None
        self._is_wrong = False
        self._trace: _client.LookupTrace | None = None
        self._forwards: TracedForwards | None = None
        self._traced: Any = None
        self._traces = 0
        self._missed = 0

    def guess(self, number: int, batch: Any, host: Any) -> tuple[Guess | None, Any]:
        """See :class:`IdPlan`. The first batch of all has no plan; the second waits until there is one."""
        if number > 0:
            self._known.wait()
        sources = self._sources
        if sources is None or sources.plan.size == 0:
            return None, None
        tensors = sources.tensors(batch, host)
        return (sources.plan, descriptions(tensors)), tensors

    def begin(self, batch: Any) -> None:
        """Traces the forward of a batch when there is no good plan."""
        self._missed = self._native.lookups_missed
        if (self._sources is None or self._is_wrong) and self._traces < _MAX_TRACES:
            self._traced = batch
            self._trace = self._native.start_trace()
            self._forwards = self._requests.ask()

    def end(self) -> None:
        """Learns from the trace, if there was one; the next batch that is begun is traced after a miss."""
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
        sources = IdSources(trace, [*((Root(path), tensor) for path, tensor in id_tensors(batch)), *traced])
        unmatched = sources.plan.unmatched
        if sources.plan.size == 0 and not unmatched:
            return
        self._sources, self._is_wrong = sources, False
        if unmatched and self._traces == 1:
            _log.warning(
                "prefetch: lookups of %s use ids that are no views or casts of a tensor of the batch; their rows are "
                "pulled when they are used. ids=fn(batch) can name them",
                ", ".join(sorted(set(unmatched))),
            )
