"""The gradients that a step's backwards have brought for one table on devices, and their sums by key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cpp_ext import _client
from ...cpp_ext.device import lookup_math, row_optimizers
from ...cpp_ext.device.link import numbers_of
from ...cpp_ext.device.lookup_math import Entries


@dataclass(frozen=True)
class StagedLookup:
    """What the backward of one lookup has brought.

    Attributes:
        keys: the keys of the lookup, (u) int64, sorted and unique.
        entries: what is added to the sums; a position counts the keys.
        is_by_column: whether the entries are of single columns, as those of pooling by max.
        reaches_all: whether each key surely has an entry.
    """

    keys: Tensor
    entries: Entries
    is_by_column: bool
    reaches_all: bool = False


@dataclass(frozen=True)
class KeySums:
    """The sums of one step by key.

    Attributes:
        keys: the keys that a gradient has reached, (n) int64, sorted.
        grads: their sums, (n, dim) float32.
        nonfinite_rows: how many sums have NaN or Inf.
        nonfinite_key: the first key of such a sum; 0 where there is none.
        clipped_rows: how many sums were shortened.
    """

    keys: Tensor
    grads: Tensor
    nonfinite_rows: int = 0
    nonfinite_key: int = 0
    clipped_rows: int = 0


def sum_lookups(lookups: Sequence[StagedLookup], dim: int, device: torch.device) -> KeySums:
    """Sums gradients by key, in the order of the backwards and of the ids within each.

    Args:
        lookups: of one table; all of them are by column, or none is.
        dim: the number of columns.
        device: the device of the table.
    """
    if not lookups:
        return KeySums(torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dim, device=device))
    if len(lookups) == 1 and lookups[0].reaches_all and not lookups[0].is_by_column:  # the usual case never waits
        (only,) = lookups
        sums = torch.empty(only.keys.shape[0], dim, device=device)
        lookup_math.sum_entries([only.entries], only.keys.shape[0], sums)
        return KeySums(only.keys, sums)
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
    return KeySums(keys.index_select(0, kept), sums.index_select(0, kept))


def seal(tables: Sequence[KeySums], *, scale: float, clip_row_norm: float) -> list[KeySums]:
    """Multiplies sums by ``scale``, counts those with NaN or Inf, and shortens rows, as the native session does.

    Args:
        tables: the sums of each table, on one device; the host waits for it once.
        scale: the factor.
        clip_row_norm: the largest norm of a row; Inf: none is shortened.
    """
    made, counted = list(tables), []
    for index, sums in enumerate(tables):
        if sums.keys.shape[0] == 0:
            continue
        if sums.grads.device.type == "cpu":
            grads = sums.grads.contiguous()
            bad, first, clipped = _client.seal_rows(grads.numpy(), scale=scale, clip_row_norm=clip_row_norm)
            made[index] = KeySums(sums.keys, grads, bad, int(sums.keys[first]) if bad else 0, clipped)
            continue
        grads, is_bad, is_clipped = row_optimizers.seal_rows(sums.grads, scale, clip_row_norm)
        first_bad = torch.where(is_bad, sums.keys, torch.iinfo(torch.int64).max).min()
        counted.append((index, grads, torch.stack([is_bad.sum(), first_bad, is_clipped.sum()])))
    if counted:
        found = numbers_of(torch.stack([numbers for _, _, numbers in counted]))
        for (index, grads, _), (bad, first, clipped) in zip(counted, found, strict=True):
            shortened = clipped if clip_row_norm < math.inf else 0
            made[index] = KeySums(tables[index].keys, grads, bad, first if bad else 0, shortened)
    return made
