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
from ..batch_tensors import Description, Path, description, id_tensors, tensor_at

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
        """It is done with it, or the pass is over; whoever waits in ``guess`` goes on."""
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
            for seen, held in zip(_tensors(name, ids), _tensors(name, on_host[name]), strict=True):
                names.append(self._prefix + table)
                pairs.append((seen, held))
        return (_client.MergePlan(names), [description(seen, held) for seen, held in pairs]), pairs

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
    """Learns from the first forward, by memory: a lookup's tensor is one of the batch's, or an index or range of one.

    Lookups that find rows missing later make it learn anew, a bounded number of times.
    """

    def __init__(self, native: _client.NativeSession) -> None:
        self._native = native
        self._known = threading.Event()
        self._guess: tuple[_client.MergePlan, list[Path]] | None = None
        self._is_wrong = False
        self._trace: _client.LookupTrace | None = None
        self._traced: Any = None
        self._traces = 0
        self._missed = 0

    def guess(self, number: int, batch: Any, host: Any) -> tuple[Guess | None, Any]:
        """See :class:`IdPlan`. The first batch of all has no plan; the second waits until there is one."""
        if number > 0:
            self._known.wait()
        if self._guess is None:
            return None, None
        plan, paths = self._guess
        if plan.size == 0:
            return None, None
        seen = [tensor_at(batch, path) for path in paths]
        held = seen if host is batch else [tensor_at(host, path) for path in paths]
        return (plan, [description(*pair) for pair in zip(seen, held, strict=True)]), (seen, held)

    def begin(self, batch: Any) -> None:
        """Traces the forward of a batch when there is no good plan."""
        self._missed = self._native.lookups_missed
        if (self._guess is None or self._is_wrong) and self._traces < _MAX_TRACES:
            self._traced = dict(id_tensors(batch))
            self._trace = self._native.start_trace()

    def end(self) -> None:
        """Learns from the trace, if there was one; the next batch that is begun is traced after a miss."""
        trace, self._trace = self._trace, None
        if trace is not None:
            found, self._traced = self._traced, None
            self._traces += 1
            plan = _client.learn_merge(trace, [description(tensor, tensor) for tensor in found.values()])
            if plan.size or plan.unmatched:
                self._guess, self._is_wrong = (plan, list(found)), False
                if plan.unmatched and self._traces == 1:
                    _log.warning(
                        "prefetch: lookups of %s use ids that are in no tensor of the batch as they are; their rows "
                        "are pulled when they are used. ids=fn(batch) can name them",
                        ", ".join(sorted(set(plan.unmatched))),
                    )
        elif self._native.lookups_missed > self._missed:
            self._is_wrong = True
        self._known.set()
