"""Assigns slots to the shards of serving, which says for which slots a process answers."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...proto.errors import InvalidArgument, not_allowed


@dataclass(frozen=True)
class ShardAssignment:
    """The shard and replica of a serving process.

    Serving has a number of shards of its own; slots are those of the cluster that trained the model.

    Args:
        shard: the number of the shard, in [0, shards).
        shards: the number of shards.
        replica: the number of the replica of the shard.

    Raises:
        InvalidArgument: a number is out of range.
    """

    shard: int = 0
    shards: int = 1
    replica: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.shards <= 1024 or not 0 <= self.replica < 65536:
            raise InvalidArgument(
                f"--shard {self.shard}/{self.shards} --replica {self.replica} is not allowed; allowed: I/N with "
                "0 <= I < N <= 1024, replica in [0, 65536)"
            )

    @staticmethod
    def parse(shard: str, replica: int = 0) -> ShardAssignment:
        """Makes the assignment from the text ``I/N`` and the number of the replica.

        Raises:
            InvalidArgument: the text does not have that form, or a number is out of range.
        """
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", shard)
        if match is None:
            raise not_allowed("--shard", shard, "I/N, such as 0/1")
        return ShardAssignment(int(match[1]), int(match[2]), replica)

    @property
    def route_epoch(self) -> int:
        """The epoch of the slot map. It is the number of shards, so that a client with another number is refused."""
        return self.shards

    def owners(self, slot_count: int) -> NDArray[np.uint16]:
        """Returns the shard of each slot, (slot_count) uint16; each shard has one contiguous range.

        Raises:
            InvalidArgument: there are more shards than slots.
        """
        if self.shards > slot_count:
            raise InvalidArgument(f"--shard: {self.shards} shards are more than the model's {slot_count} slots")
        return (np.arange(slot_count, dtype=np.uint64) * self.shards // slot_count).astype(np.uint16)

    def owned(self, slot_count: int) -> NDArray[np.bool_]:
        """Returns whether this process answers for each slot, (slot_count) bool."""
        return np.asarray(self.owners(slot_count) == self.shard)
