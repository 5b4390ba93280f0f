"""Which rank has a key of a table on devices: a function of the table, the key and the number of ranks alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cpp_ext.device.link import numbers_of


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


def by_owner(lookups: Sequence[tuple[Share, Tensor]]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Divides keys by the ranks that have them; the host waits for the device once.

    Args:
        lookups: the division and the keys, (n) int64, of each lookup.

    Returns:
        The keys of each rank, by lookup, and the order in which their concatenation has the given keys.
    """
    if all(share.world == 1 for share, _ in lookups):
        return (
            [[keys] for _, keys in lookups],
            [torch.arange(len(keys), device=keys.device) for _, keys in lookups],
        )
    owners = [share.owners(keys) for share, keys in lookups]
    orders = [torch.argsort(each, stable=True) for each in owners]
    # bincount would wait for the device, each time.
    counts = [
        each.new_zeros(share.world).index_add_(0, each, torch.ones_like(each))
        for each, (share, _) in zip(owners, lookups, strict=True)
    ]
    sizes = numbers_of(torch.stack(counts))
    parts = [
        list(keys.index_select(0, order).split(each))
        for (_, keys), order, each in zip(lookups, orders, sizes, strict=True)
    ]
    return parts, orders
