"""The record of a traced forward: which layers looked what up, from which a plan is learnt."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...cpp_ext import _client
from ..data.batch_tensors import can_hold_ids, tensors_of
from .expressions import Expression, Root, TracedIds
from .parts import Memory, expression_in, memory_of
from .plan import Arguments, LookupPlan, PlannedLookup
from .planned_layer import PlannedLayer
from .trace import ForwardTrace


@dataclass(frozen=True)
class _Argument:
    tensor: Tensor  # keeps its memory from being used again before the plan is learnt
    expression: Expression | None  # of the trace


@dataclass(frozen=True)
class _Call:
    layer: PlannedLayer
    arguments: tuple[_Argument | None, ...]


class ForwardRecord:
    """Records the lookups of a forward from the construction of this object on, until :meth:`plan` or :meth:`leave`.

    Args:
        batch: the arguments of the forward.
        native: the session's own record of lookups, which has those of no layer too; None: there is none.
    """

    def __init__(self, batch: Any, native: _client.LookupTrace | None) -> None:
        self._native = native
        # Taken now, because a forward may replace entries of its arguments.
        self._tensors = [(Root(path), memory_of(tensor), tensor) for path, tensor in tensors_of(batch)]
        self._calls: list[_Call] = []
        self._trace = ForwardTrace(batch)
        self._trace.__enter__()

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the calling thread is the one whose forward is recorded."""
        return self._trace.is_of_this_thread

    def note(self, layer: PlannedLayer, arguments: Arguments) -> None:
        """Notes the call of a layer."""
        noted = [
            None if each is None else _Argument(each.detach(), self._trace.expression_of(each)) for each in arguments
        ]
        self._calls.append(_Call(layer, tuple(noted)))

    def leave(self) -> list[TracedIds]:
        """Ends the record and returns, in order, the ids of lookups that are computed from the batch."""
        return self._trace.leave()

    def plan(self, traced: Sequence[TracedIds]) -> LookupPlan:
        """Returns the plan of the forward.

        Args:
            traced: what :meth:`leave` returned; fewer of them make a plan of fewer ids.
        """
        derived = [(found.expression, memory_of(found.ids)) for found in traced]
        batch = [(root, memory) for root, memory, tensor in self._tensors if can_hold_ids(tensor) and tensor.dim() > 0]
        known = [*batch, *derived]
        ids, _ = ids_of(self._native, known)
        return LookupPlan(list(self._planned(known)), ids)

    def _planned(self, known: Sequence[tuple[Expression, Memory]]) -> Iterator[PlannedLookup]:
        """Yields the calls all of whose arguments are expressions of the batch, or their ids are and suffice."""
        for call in self._calls:
            is_joint = call.layer.is_joint
            ids, offsets, weights = (
                None if argument is None else self._expression_of(argument, known if place == 0 else (), is_joint)
                for place, argument in enumerate(call.arguments)
            )
            is_found = [each is not None for each in (ids, offsets, weights)]
            is_whole = is_found == [each is not None for each in call.arguments]
            if ids is None or not (is_whole or call.layer.is_on_devices):
                continue
            others = (offsets, weights) if is_whole else ()  # rows of the ids are read ahead all the same
            yield PlannedLookup(weakref.ref(call.layer), call.layer.binding, ids, *others)

    def _expression_of(
        self, argument: _Argument, known: Sequence[tuple[Expression, Memory]], is_joint: bool
    ) -> Expression | None:
        """Returns the expression of an argument; None: it is none of the batch.

        Where ``known`` is empty, it is sought among tensors of the batch with its dtype. Where ranks make the lookup
        together (``is_joint``), the trace goes first, because all of them have it.
        """
        if is_joint and argument.expression is not None:
            return argument.expression
        tensor = argument.tensor
        places = known or [(root, memory) for root, memory, other in self._tensors if other.dtype == tensor.dtype]
        return expression_in(memory_of(tensor), places) or argument.expression


def ids_of(
    native: _client.LookupTrace | None, known: Sequence[tuple[Expression, Memory]]
) -> tuple[list[tuple[str, Expression]], list[str]]:
    """Returns the table and the ids of each lookup that the session has recorded, and the tables of unknown ids.

    Args:
        native: the session's record.
        known: expressions with the memory of their values.
    """
    ids: list[tuple[str, Expression]] = []
    unknown: list[str] = []
    for binding, address, sizes, strides, item_bytes in [] if native is None else native.lookups:
        expression = expression_in(Memory(address, sizes, strides, item_bytes), known)
        if expression is None:
            unknown.append(binding)
        else:
            ids.append((binding, expression))
    return ids, unknown
