"""Which slots a serving process answers for."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...proto.errors import InvalidArgument


@dataclass(frozen=True)
class ShardAssignment:
    """Shard ``shard`` of ``shards``, and which of its replicas.

    The number of shards is serving's own; slots are those of the cluster that trained the model.
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
        """From ``I/N``.

        Raises:
            InvalidArgument: it is not of that form.
        """
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", shard)
        if match is None:
            raise InvalidArgument(f"--shard {shard!r} is not allowed; allowed: I/N, such as 0/1")
        return ShardAssignment(int(match[1]), int(match[2]), replica)

    @property
    def route_epoch(self) -> int:
        """Of the slot map, so that a client with another number of shards is refused."""
        return self.shards

    def owners(self, slot_count: int) -> NDArray[np.uint16]:
        """(slot_count) shard of each slot: one contiguous range for each shard."""
        if self.shards > slot_count:
            raise InvalidArgument(f"--shard: {self.shards} shards are more than the model's {slot_count} slots")
        return (np.arange(slot_count, dtype=np.uint64) * self.shards // slot_count).astype(np.uint16)

    def owned(self, slot_count: int) -> NDArray[np.bool_]:
        """(slot_count) whether this process answers for the slot."""
        return np.asarray(self.owners(slot_count) == self.shard)
