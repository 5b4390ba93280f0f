"""The slot map, which assigns slots to shards, and the epoch that every change raises."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....proto.errors import not_allowed
from ....proto.route import check_slot_count, owners_of_runs, runs_of_owners


@dataclass(frozen=True)
class SlotMap:
    """The owners of all slots at one epoch.

    Attributes:
        epoch: the version of the map, >= 1.
        owners: (slot_count) uint16, the shard index of each slot.
    """

    epoch: int
    owners: NDArray[np.uint16]

    @staticmethod
    def even(slot_count: int, shards: int) -> SlotMap:
        """Returns the map of epoch 1: one contiguous range per shard, whose lengths differ by at most one slot.

        A hash spreads rows over slots, so contiguous ranges are as even as any others, and short when stored.

        Raises:
            InvalidArgument: ``slot_count`` is not a power of two in range, or is smaller than ``shards``.
        """
        check_slot_count(slot_count)
        if not 1 <= shards <= slot_count:
            raise not_allowed("shards", shards, f"[1, slot_count ({slot_count})]")
        owners = np.arange(slot_count, dtype=np.uint64) * np.uint64(shards) // np.uint64(slot_count)
        return SlotMap(1, owners.astype(np.uint16))

    @staticmethod
    def from_runs(epoch: int, slot_count: int, runs: list[tuple[int, int]]) -> SlotMap:
        """Returns the map of stored runs ``(first slot, shard)``.

        Raises:
            InvalidArgument: the runs do not cover all slots in order.
        """
        return SlotMap(epoch, owners_of_runs(runs, slot_count))

    @property
    def slot_count(self) -> int:
        """The number of slots, a power of two."""
        return len(self.owners)

    def runs(self) -> list[tuple[int, int]]:
        """Returns the map as ascending runs ``(first slot, shard)``."""
        return runs_of_owners(self.owners)

    def owns_any(self, shard: int, first: int, end: int) -> bool:
        """Whether a shard owns one of the slots [first, end)."""
        return bool((self.owners[first:end] == shard).any())

    def bounds_of(self, shard: int) -> tuple[int, int]:
        """Returns the range [first, end) that has all slots of a shard; (0, 0) when it has none."""
        found = np.flatnonzero(self.owners == shard)
        return (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0)

    def slots_of(self, shard: int) -> int:
        """Returns the number of slots that a shard owns."""
        return int(np.count_nonzero(self.owners == shard))
