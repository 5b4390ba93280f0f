"""The plan of a model's lookups: which layers look which parts of a batch up, learnt from a traced forward.

A plan is a guess about later batches and is checked against each. Results do not depend on it: a lookup that was not
planned, or that a batch does not fit, is made when its layer is called.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ...cpp_ext import _client
from ..data.batch_tensors import Description, can_hold_ids, description, on_host, tensor_at
from .expressions import Expression, Fixed, HostCopy, Root, Slice, Values, text_of
from .planned_layer import PlannedLayer

# The ids, the offsets and the weights of a lookup; None: it has none.
Arguments: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
# A tensor as the lookups see it, and the same tensor on the host; None: the batch has none.
Seen: TypeAlias = tuple[Tensor | None, Tensor | None]

LEAST_LOOKUPS = 2  # that are worth an op of their own
_NOWHERE = (None, None)
_UNDESCRIBED = description(None, None)
_top_hooks: Callable[[bool], object | None] = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(frozen=True)
class PlannedLookup:
    """A lookup that a layer makes.

    Attributes:
        layer: the layer.
        binding: the name of its table.
        ids, offsets, weights: the arguments of the call, as expressions of the batch; None: the call has none.
    """

    layer: weakref.ref[PlannedLayer]
    binding: str
    ids: Expression
    offsets: Expression | None = None
    weights: Expression | None = None

    @property
    def expressions(self) -> Iterator[Expression]:
        """The expressions of the arguments that the call has."""
        return (each for each in (self.ids, self.offsets, self.weights) if each is not None)

    @property
    def text(self) -> str:
        """The lookup as text; processes that trace the same forward have the same text."""
        arguments = (self.ids, self.offsets, self.weights)
        return "\n".join([self.binding, *("" if each is None else text_of(each) for each in arguments)])


@dataclass(frozen=True)
class IdPart:
    """The part of a batch that the ids of a lookup are.

    Attributes:
        binding: the name of the table.
        root: the index, in :attr:`LookupPlan.roots`, of the tensor that the ids are a part of.
        part: the part; None: the ids are the whole tensor.
    """

    binding: str
    root: int
    part: Slice | None

    @property
    def for_native(self) -> tuple[str, int, str, int, int, int]:
        """This part as ``PlannedIds`` takes it."""
        if self.part is None:
            return self.binding, self.root, "whole", 0, 0, 0
        kind = "select" if self.part.length is None else "narrow"
        return self.binding, self.root, kind, self.part.dim, self.part.start, self.part.length or 0


class LookupPlan:
    """The lookups of a forward, and the ids whose rows shards give.

    Args:
        lookups: the lookups of layers, in their order.
        ids: the tables and the ids of all lookups that this rank made itself, also those of no layer.

    Attributes:
        lookups: as given.
        parts: the ids of lookups that this rank makes itself, each once.
        roots: the tensors that they are parts of.
        native: the parts, as the native half takes them.
    """

    def __init__(self, lookups: Sequence[PlannedLookup], ids: Sequence[tuple[str, Expression]]) -> None:
        self.lookups = lookups
        roots: dict[Expression, int] = {}
        self._index: dict[tuple[str, Expression], int] = {}
        self.parts: list[IdPart] = []
        for binding, expression in dict.fromkeys(ids):
            part = expression if isinstance(expression, Slice) else None
            root = roots.setdefault(expression if part is None else part.source, len(roots))
            self._index[binding, expression] = len(self.parts)
            self.parts.append(IdPart(binding, root, part))
        self.roots = list(roots)
        self.native = _client.PlannedIds([part.for_native for part in self.parts])

    def index_of(self, lookup: PlannedLookup) -> int | None:
        """Returns the index of a lookup's ids in ``parts``; None: shards do not give its rows."""
        return self._index.get((lookup.binding, lookup.ids))

    def tensors(self, batch: Any, host_of: HostCopy = on_host) -> list[Seen]:
        """Returns the tensor of each root, as the lookups see it and on the host; both None where it does not fit.

        Args:
            batch: the batch as the forward will see it.
            host_of: gives the values of its tensors on the host; the default copies those that are not there.
        """
        values: Values | None = None
        seen: list[Seen] = []
        for root in self.roots:
            if isinstance(root, Root):
                tensor = tensor_at(batch, root.path)
                seen.append(_NOWHERE if tensor is None or not can_hold_ids(tensor) else (tensor, host_of(tensor)))
            else:
                values = Values(batch, host_of) if values is None else values
                seen.append(_computed(root, values))
        return seen


def _computed(root: Expression, values: Values) -> Seen:
    with torch.no_grad():
        ids = values.of(root)
    return _NOWHERE if ids is None or not (isinstance(root, Fixed) or can_hold_ids(ids)) else (ids, ids)


def descriptions(tensors: Sequence[Seen]) -> list[Description]:
    """Returns the descriptions that the native half takes; the tensors must live until it has read them."""
    return [_UNDESCRIBED if seen is None and host is None else description(seen, host) for seen, host in tensors]


class BatchIds:
    """Makes the ids of lookups of one batch's tensors.

    Where lookups select most indexes of a dimension, one call makes all of them.

    Args:
        parts: the ids of each lookup.
    """

    def __init__(self, parts: Sequence[IdPart]) -> None:
        places = [_place_of(each) for each in parts]
        self._selects = Counter(place for place in places if place is not None)
        self._groups: list[tuple[int, int, Callable[[Sequence[Tensor]], Sequence[Tensor]]]] = []
        for place, group in groupby(parts, key=_place_of):
            starts = [each.part.start for each in group if each.part is not None]
            if place is None or len(starts) < LEAST_LOOKUPS or len(starts) != self._selects[place]:
                self._groups = []
                break
            self._groups.append((*place, itemgetter(*starts)))
        self._wholes = [each.root for each in parts] if all(each.part is None for each in parts) else None

    def all_of(self, tensors: Sequence[Seen]) -> list[Tensor] | None:
        """Returns the ids of all lookups; None where they are to be made one by one.

        Args:
            tensors: those that the plan's parts are of.
        """
        if self._wholes is not None:
            ids = [tensors[root][0] for root in self._wholes]
            return None if any(each is None for each in ids) else cast(list[Tensor], ids)
        out: list[Tensor] = []
        for root, dim, pick in self._groups:
            tensor = tensors[root][0]
            if tensor is None or tensor.dim() <= dim or not 0 < tensor.size(dim) <= 2 * self._selects[root, dim]:
                return None
            try:
                out.extend(pick(tensor.unbind(dim)))
            except IndexError:  # a batch of another shape
                return None
        return out or None

    def of(self, ids: IdPart, tensor: Tensor, made: dict[tuple[int, int], Sequence[Tensor]]) -> Tensor:
        """Returns the ids of a lookup.

        Args:
            ids: which they are.
            tensor: the tensor that they are a part of.
            made: what one call has made of this batch's tensors so far; more of it is added.

        Raises:
            RuntimeError, IndexError: the batch has another shape.
        """
        place = _place_of(ids)
        if ids.part is None or place is None:
            return tensor if ids.part is None else ids.part.of(tensor)
        parts = made.get(place)
        if parts is None:
            is_worth_it = tensor.size(ids.part.dim) <= 2 * self._selects[place]
            made[place] = parts = tensor.unbind(ids.part.dim) if is_worth_it else ()
        return parts[ids.part.start] if parts else ids.part.of(tensor)


def _place_of(ids: IdPart) -> tuple[int, int] | None:
    """Returns the tensor and the dimension of which ids are one index; None where they are not."""
    return None if ids.part is None or ids.part.length is not None else (ids.root, ids.part.dim)


def is_transformed() -> bool:
    """Whether this forward may be computed again, as under activation checkpointing, or is transformed or traced.

    No plan serves such a forward.
    """
    is_transformed: bool = torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None
    return is_transformed or has_hooks()


def has_hooks() -> bool:
    """Whether this thread has hooks of saved tensors, such as those of activation checkpointing."""
    return _top_hooks(True) is not None
