"""Which part of the batch the ids of each lookup are that is made ahead; ``rows_ahead.py`` makes the rows."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, cast

from torch import Tensor

from ..data.batch_tensors import Path

if TYPE_CHECKING:
    from .embedding import DistributedLayer

LEAST_LOOKUPS = 2


@dataclass(frozen=True)
class PlannedLookup:
    """A lookup to make ahead: its layer, the part of the batch that its ids are, and where its offsets are."""

    layer: weakref.ref[DistributedLayer]
    root: int
    kind: str
    dim: int
    start: int
    length: int
    offsets: Path | None

    def ids_of(self, root: Tensor) -> Tensor:
        """Returns the ids, which are a part of ``root``."""
        if self.kind == "whole":
            return root
        if self.kind == "select":
            return root.select(self.dim, self.start)
        return root.narrow(self.dim, self.start, self.length)


class LookupParts:
    """The parts of one batch's tensors that the planned lookups are.

    Where lookups select most places of a dimension, one call makes all of them.

    Args:
        planned: the lookups.
    """

    def __init__(self, planned: Sequence[PlannedLookup]) -> None:
        self._planned = planned
        self._selects = Counter((each.root, each.dim) for each in planned if each.kind == "select")
        self._groups: list[tuple[int, int, Callable[[Sequence[Tensor]], Sequence[Tensor]]]] = []
        for (kind, root, dim), group in groupby(planned, key=lambda each: (each.kind, each.root, each.dim)):
            starts = [each.start for each in group]
            if kind != "select" or len(starts) < LEAST_LOOKUPS or len(starts) != self._selects[root, dim]:
                self._groups = []
                break
            self._groups.append((root, dim, itemgetter(*starts)))
        self._wholes = [each.root for each in planned] if all(each.kind == "whole" for each in planned) else None

    def all_of(self, roots: Sequence[tuple[Tensor | None, Tensor | None]]) -> list[Tensor] | None:
        """Returns the ids of all planned lookups; None where they are to be made one by one."""
        if self._wholes is not None:
            ids = [roots[root][0] for root in self._wholes]
            return None if any(each is None for each in ids) else cast(list[Tensor], ids)
        out: list[Tensor] = []
        for root, dim, pick in self._groups:
            tensor = roots[root][0]
            if tensor is None or tensor.dim() <= dim or not 0 < tensor.size(dim) <= 2 * self._selects[root, dim]:
                return None
            try:
                out.extend(pick(tensor.unbind(dim)))
            except IndexError:  # a batch of another shape
                return None
        return out or None

    def of(self, planned: PlannedLookup, root: Tensor, made: dict[tuple[int, int], Sequence[Tensor]]) -> Tensor:
        """Returns the ids of a lookup.

        Args:
            planned: the lookup.
            root: the tensor that it takes a part of.
            made: what one call has made of this batch's tensors so far; more of it is added.
        """
        if planned.kind != "select":
            return planned.ids_of(root)
        place = planned.root, planned.dim
        parts = made.get(place)
        if parts is None:
            size = root.size(planned.dim)
            is_worth_it = size <= 2 * self._selects[place]
            made[place] = parts = root.unbind(planned.dim) if is_worth_it else ()
        return parts[planned.start] if parts else planned.ids_of(root)
