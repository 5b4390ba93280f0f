"""The gradients that a step's backwards have brought for tables on devices, and their sums by key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ...cpp_ext import _client
from ...cpp_ext.device import lookup_math, row_optimizers
from ...cpp_ext.device.link import numbers_of
from ...cpp_ext.device.lookup_math import Entries


@dataclass(frozen=True)
class JointKeys:
    """The unique keys of several lookups of tables of one matrix, lookup by lookup.

    Attributes:
        numbers: (u) int64: the key of each, behind all rows of the tables of earlier lookups; in ascending order.
        bases: (lookups) int64 on the device: how many rows that are for each lookup.
        rows: (u) int64: the row of each in the matrix, where this rank has all of them; None: other ranks have some.
        tables: the place of each lookup's table in the matrix, in ascending order.
        sizes: the number of keys of each lookup.
        paddings: (lookups) int32: the place of the padding id of each, -1 where it is not there; None: of none it is.
    """

    numbers: Tensor
    bases: Tensor
    rows: Tensor | None
    tables: Sequence[int]
    sizes: Sequence[int]
    paddings: Tensor | None = None

    @cached_property
    def keys(self) -> Tensor:
        """(u) int64, sorted and unique within each lookup. A step on one rank does not need them."""
        of_key = torch.searchsorted(self.bases, self.numbers, right=True) - 1
        return self.numbers - self.bases.index_select(0, of_key)

    def keys_of(self, place: int) -> Tensor:
        """Returns the keys of one lookup."""
        return self.keys[self.begins[place] :][: self.sizes[place]]

    @cached_property
    def begins(self) -> Sequence[int]:
        """The place of each lookup's first key."""
        return list(accumulate(self.sizes[:-1], initial=0))

    def without(self, lookups: Sequence[int], places: Sequence[int]) -> JointKeys:
        """Returns the keys but one of each of some lookups, which lies at that place; both in ascending order."""
        sizes = [size - (lookup in lookups) for lookup, size in enumerate(self.sizes)]
        rows = None if self.rows is None else without(self.rows, places)
        return JointKeys(without(self.numbers, places), self.bases, rows, self.tables, sizes)


@dataclass(frozen=True)
class StagedLookup:
    """What the backward of one lookup has brought.

    Attributes:
        own_keys: the keys of the lookup, (u) int64, sorted and unique; None: ``joint`` has them.
        entries: what is added to the sums; a position counts the keys, or with ``joint`` those of all its lookups.
        is_by_column: whether the entries are of single columns, as those of pooling by max.
        left_out: the place of the only key that has no entry, counted as positions are; -1: each has one; None: it is
            not known which have none.
        joint: the keys of the lookups that were made together; None: it was made alone, or its entries are by column.
        place: of the lookup among those.
        part: the lookup's first and end gradient, and its first and end entry, where the entries are of several; None:
            all are its own.
    """

    own_keys: Tensor | None
    entries: Entries
    is_by_column: bool
    left_out: int | None = None
    joint: JointKeys | None = None
    place: int = 0
    part: tuple[tuple[int, int], tuple[int, int]] | None = None

    @property
    def keys(self) -> Tensor:
        """(u) int64: the keys of the lookup."""
        if self.own_keys is not None:
            return self.own_keys
        assert self.joint is not None
        return self.joint.keys_of(self.place)

    def alone(self) -> StagedLookup:
        """Returns the same with entries of its own, whose positions count the keys of this lookup."""
        if self.joint is None:
            return self
        all_of, begin = self.entries, self.joint.begins[self.place]
        if self.part is not None:
            grads, ids = (slice(*each) for each in self.part)
            sources = None if all_of.sources is None else all_of.sources[ids] - self.part[0][0]
            scales = None if all_of.scales is None else all_of.scales[ids]
            all_of = Entries(all_of.grads[grads], all_of.positions[ids], sources, scales)
        left_out, positions = self.left_out, all_of.positions - begin
        if left_out != -1:  # what is left out has the number of all keys, and now that of these
            positions = positions.clamp(max=self.joint.sizes[self.place])
        if left_out is not None and left_out >= 0:
            left_out -= begin
        own = replace(all_of, positions=positions)
        return StagedLookup(self.keys, own, is_by_column=self.is_by_column, left_out=left_out)


@dataclass(frozen=True)
class KeySums:
    """The sums of one step by key, of the tables of a matrix.

    Attributes:
        given: the keys that a gradient has reached, (n) int64, table by table, sorted within each; or what has them.
        grads: their sums, (n, dim) float32.
        sizes: the number of keys of each table.
        rows: (n) int64: the row of each key in the matrix; None: other ranks have some, or it is not known yet.
        numbers: () float32 each, on the device: one that is finite where all sums are, unless it overflows, and, where
            there is a limit, how many sums were shortened; none where the sums are judged.
        nonfinite_rows: how many sums have NaN or Inf.
        nonfinite_place: the place of the first such sum; 0 where there is none.
        clipped_rows: how many sums were shortened.
    """

    given: Tensor | JointKeys
    grads: Tensor
    sizes: Sequence[int]
    rows: Tensor | None = None
    numbers: Sequence[Tensor] = ()
    nonfinite_rows: int = 0
    nonfinite_place: int = 0
    clipped_rows: int = 0

    @property
    def keys(self) -> Tensor:
        """(n) int64: the keys that a gradient has reached."""
        return self.given.keys if isinstance(self.given, JointKeys) else self.given

    def table_at(self, place: int) -> int:
        """Returns the table of the key at a place, by its place in the matrix."""
        return next(table for table, end in enumerate(accumulate(self.sizes)) if place < end)

    def sealed(self, scale: float, clip_row_norm: float) -> KeySums:
        """Returns the sums times ``scale``, shortened to a norm of ``clip_row_norm``, as the native session has them.

        On a device they are to be judged yet; nothing waits for it.
        """
        if self.grads.shape[0] == 0:
            return self
        if self.grads.is_cpu:
            grads = self.grads.contiguous()
            bad, first, clipped = _client.seal_rows(grads.numpy(), scale=scale, clip_row_norm=clip_row_norm)
            place = first if bad else 0
            return replace(self, grads=grads, nonfinite_rows=bad, nonfinite_place=place, clipped_rows=clipped)
        grads, is_clipped = row_optimizers.seal_rows(self.grads, scale, clip_row_norm)
        numbers = [grads.sum(), *([] if is_clipped is None else [is_clipped.sum(dtype=torch.float32)])]
        return replace(self, grads=grads, numbers=numbers)

    def judged(self, numbers: Sequence[float]) -> KeySums:
        """Returns the sums, judged by the values of :attr:`numbers`."""
        if not numbers:
            return self
        total, *clipped = numbers
        judged = replace(self, numbers=(), clipped_rows=int(sum(clipped)))
        if math.isfinite(total):
            return judged
        is_bad = row_optimizers.is_nonfinite(self.grads)
        bad, first = numbers_of(torch.stack([is_bad.sum(), torch.argmax(is_bad.to(torch.int8))]))
        return replace(judged, nonfinite_rows=bad, nonfinite_place=first if bad else 0)


def sum_tables(staged: Sequence[Sequence[StagedLookup]], dim: int, device: torch.device) -> KeySums:
    """Sums gradients by key, in the order of the backwards and of the ids within each.

    Lookups that were made together, one of a table, are summed together where it is known which keys they reach.

    Args:
        staged: the lookups of each table of a matrix; those of a table are all by column, or none is.
        dim: the number of columns.
        device: the device of the tables.
    """
    lookups = [each for of_table in staged for each in of_table]
    joint = lookups[0].joint if lookups else None
    tables = [table for table, of_table in enumerate(staged) if of_table]
    is_joint = len(lookups) == len(tables) and all(each.joint is joint for each in lookups)
    is_known = all(each.left_out is not None for each in lookups)
    if joint is not None and is_joint and is_known and tables == list(joint.tables):
        grads = torch.empty(joint.numbers.shape[0], dim, device=device)
        entries = list({id(each.entries): each.entries for each in lookups}.values())
        lookup_math.sum_entries(entries, joint.numbers.shape[0], grads)
        left_out = sorted((at, each.place) for each in lookups if (at := each.left_out) is not None and at >= 0)
        if left_out:
            places, of_lookups = zip(*left_out, strict=True)
            grads, joint = without(grads, places), joint.without(of_lookups, places)
        sizes = dict(zip(joint.tables, joint.sizes, strict=True))
        return KeySums(joint, grads, [sizes.get(table, 0) for table in range(len(staged))], joint.rows)
    sums = [_sum_lookups([each.alone() for each in of_table], dim, device) for of_table in staged]
    keys, grads = (torch.cat(parts) for parts in zip(*sums, strict=True))
    return KeySums(keys, grads, [len(of_table) for of_table, _ in sums])


def _sum_lookups(lookups: Sequence[StagedLookup], dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the keys and the sums of one table.

    All of the lookups are by column, or none is.
    """
    if not lookups:
        return torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dim, device=device)
    (only, *others) = lookups
    if not others and only.left_out is not None and not only.is_by_column:  # the usual case never waits
        sums = torch.empty(only.keys.shape[0], dim, device=device)
        lookup_math.sum_entries([only.entries], only.keys.shape[0], sums)
        left_out = [only.left_out] if only.left_out >= 0 else []
        return without(only.keys, left_out), without(sums, left_out)
    keys = torch.unique(torch.cat([each.keys for each in lookups]))
    count = keys.shape[0]
    is_by_column = lookups[0].is_by_column
    width = dim if is_by_column else 1
    entries, seen = [], torch.zeros(count + 1, dtype=torch.bool, device=device)
    for each in lookups:
        place = torch.cat([torch.searchsorted(keys, each.keys), torch.full((1,), count, device=device)])
        rows = place.index_select(0, torch.div(each.entries.positions, width, rounding_mode="floor").to(torch.int64))
        seen.index_fill_(0, rows, True)
        positions = rows * width + torch.remainder(each.entries.positions, width) if width > 1 else rows
        entries.append(Entries(each.entries.grads, positions, each.entries.sources, each.entries.scales))
    sums = torch.empty(count, dim, device=device)
    lookup_math.sum_entries(entries, count * width, sums.view(count * width, dim // width))
    kept = torch.nonzero(seen[:count]).reshape(-1)
    return keys.index_select(0, kept), sums.index_select(0, kept)


def without(values: Tensor, places: Sequence[int]) -> Tensor:
    """Returns what lies at all other places of the first dimension; ``places`` are in ascending order."""
    if not places:
        return values
    begins, ends = [0, *(place + 1 for place in places)], [*places, values.shape[0]]
    return torch.cat([values[begin:end] for begin, end in zip(begins, ends, strict=True)])
