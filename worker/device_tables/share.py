"""Which rank has a key of a table on devices: a function of the table, the key and the number of ranks alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """The division of the keys [0, num_rows) of one table among ranks.

    Neighbouring keys are on different ranks, so that frequent keys, which are often the small ones, are spread. The
    rank of key 0 differs between tables.

    Attributes:
        table_id: the id of the table.
        num_rows: the number of rows of the whole table.
        world: the number of ranks.
    """

    table_id: int
    num_rows: int
    world: int

    def owners(self, keys: Tensor) -> Tensor:
        """Returns the rank of each key, (n) int64."""
        return (keys + self.table_id % self.world) % self.world

    def rows(self, keys: Tensor) -> Tensor:
        """Returns the number of each key's row within its rank's share, (n) int64."""
        return torch.div(keys, self.world, rounding_mode="floor")

    def keys_of(self, rank: int) -> Tensor:
        """Returns the keys of a rank in the order of its rows, (rows of the rank) int64."""
        return torch.arange((rank - self.table_id) % self.world, self.num_rows, self.world)

    def size(self, rank: int) -> int:
        """Returns the number of rows of a rank."""
        return len(range((rank - self.table_id) % self.world, self.num_rows, self.world))
