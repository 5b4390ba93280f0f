"""Reads rows of tables on devices from the ranks that have them: of one lookup, or of several by one exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...cpp_ext.device.link import numbers_of
from .exchange import RankExchange
from .rank_rows import RankRows
from .share import by_owner


def read_rows(exchanges: RankExchange, table: RankRows, call: int, keys: Tensor) -> Tensor:
    """Returns rows of all ranks; see :meth:`DeviceTables.read`.

    Args:
        exchanges: the exchange of the ranks.
        table: this rank's rows of the table.
        call: the number of the table, by which ranks that make another call are found out.
        keys: the keys, (n) int64 on the device, unique.
    """
    if exchanges.world == 1:
        return table.read(keys)
    (parts,), (order,) = by_owner([(table.share, keys)])
    wanted = exchanges.integers(call, parts)
    dim, mine = table.schema.dim, table.read(torch.cat(wanted))
    replies = exchanges.floats(mine.split([len(each) for each in wanted]), [len(part) * dim for part in parts])
    return _in_order(torch.cat(replies).view(-1, dim), order)


def read_rows_together(
    exchanges: RankExchange, lookups: Sequence[tuple[RankRows, Tensor]], digest: int
) -> list[Tensor] | None:
    """Returns rows of several lookups; see :meth:`DeviceTables.read_together`.

    A rank gets one message of integers from each rank, the number of keys of each lookup and then all keys, and answers
    with one message of rows, lookup by lookup.

    Args:
        exchanges: the exchange of the ranks.
        lookups: this rank's rows of the table, and the keys, of each.
        digest: a number above 0 that ranks share whose lookups are alike.
    """
    if exchanges.world == 1:
        return [table.read(keys) for table, keys in lookups]
    parts, orders = by_owner([(table.share, keys) for table, keys in lookups])
    of_ranks = list(zip(*parts, strict=True))
    counts = [[len(part) for part in of_rank] for of_rank in of_ranks]
    heads = torch.tensor(counts).to(exchanges.device)
    received = exchanges.joint_integers(
        digest, [torch.cat([head, *of_rank]) for head, of_rank in zip(heads, of_ranks, strict=True)]
    )
    if received is None:
        return None
    asked = numbers_of(torch.stack([each[: len(lookups)] for each in received]))
    keys = [each[len(lookups) :].split(sizes) for each, sizes in zip(received, asked, strict=True)]
    mine = [
        table.read(torch.cat(each)).split(list(sizes))
        for (table, _), each, sizes in zip(
            lookups, zip(*keys, strict=True), zip(*asked, strict=True), strict=True
        )
    ]  # fmt: skip
    dims = [table.schema.dim for table, _ in lookups]
    lengths = [[count * dim for count, dim in zip(of_rank, dims, strict=True)] for of_rank in counts]
    replies = exchanges.floats(
        [torch.cat([each.reshape(-1) for each in of_rank]) for of_rank in zip(*mine, strict=True)],
        [sum(each) for each in lengths],
    )
    found = [reply.split(each) for reply, each in zip(replies, lengths, strict=True)]
    return [
        _in_order(torch.cat(each).view(-1, dim), order)
        for each, dim, order in zip(zip(*found, strict=True), dims, orders, strict=True)
    ]


def _in_order(rows: Tensor, order: Tensor) -> Tensor:
    """Returns the rows of a lookup's keys, given those of their concatenation by owner."""
    return torch.empty_like(rows).index_copy_(0, order, rows)
