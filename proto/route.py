"""Converts a slot map between runs, which are sent and stored, and one owner per slot, which lookups use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidArgument, not_allowed

MIN_SLOT_COUNT = 2
MAX_SLOT_COUNT = 65536
DEFAULT_SLOT_COUNT = 16384


def check_slot_count(slot_count: int) -> None:
    """Raises InvalidArgument unless ``slot_count`` is a power of two in [2, 65536]."""
    if not MIN_SLOT_COUNT <= slot_count <= MAX_SLOT_COUNT or slot_count & (slot_count - 1):
        raise not_allowed("slot_count", slot_count, f"a power of two in [{MIN_SLOT_COUNT}, {MAX_SLOT_COUNT}]")


def owners_of_runs(runs: Sequence[tuple[int, int]], slot_count: int) -> NDArray[np.uint16]:
    """Returns the owner of each slot, (slot_count) uint16, from runs.

    Args:
        runs: (first slot, shard) of each run, in ascending order; the first run begins at slot 0.
        slot_count: the number of slots of the cluster.

    Raises:
        InvalidArgument: the runs do not cover [0, slot_count) in order, or a shard index is above 65535.
    """
    check_slot_count(slot_count)
    starts = [start for start, _ in runs]
    if not runs or starts[0] != 0 or starts[-1] >= slot_count or any(a >= b for a, b in pairwise(starts)):
        raise InvalidArgument("route: its runs must start at slot 0 and ascend within slot_count")
    if any(not 0 <= shard < 65536 for _, shard in runs):
        raise InvalidArgument("route: shard indexes must be in [0, 65535]")
    lengths = np.diff([*starts, slot_count])
    return np.repeat(np.array([shard for _, shard in runs], np.uint16), lengths)


def runs_of_owners(owners: NDArray[np.uint16]) -> list[tuple[int, int]]:
    """Returns the runs ``(first slot, shard)`` of (slot_count) uint16 owners; the inverse of :func:`owners_of_runs`."""
    starts = np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]])
    return [(int(start), int(owners[start])) for start in starts]
