"""Pools the rows of a list: its sum, its mean, its sum over the root of squared weights, or its maximum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .jagged import sample_of_values, segment_max, segment_sum

POOLS = ("sum", "mean", "sqrtn", "max")


def pooled(
    table: nn.Module, is_bag: bool, pool: str, ids: Tensor, offsets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Returns the pooled rows of lists, (B, dim); zeros for a list without ids, or whose weights sum to 0.

    With rows r and weights w, which are 1 when there are none, ``sum`` is the sum of w r, ``mean`` that sum over the
    sum of w, ``sqrtn`` that sum over the root of the sum of w squared, and ``max`` the largest value of each column.

    Args:
        table: the table.
        is_bag: whether the table is an ``nn.EmbeddingBag`` of mode "sum" that takes the last offset, and not an
            ``nn.Embedding``.
        pool: one of POOLS.
        ids: the ids of all lists, (m) int64.
        offsets: where each list begins, and the end, (B + 1) int64.
        weights: the weight of each id, (m) float32; None: 1.

    Raises:
        ValueError: there are weights, and the pool is "max".
    """
    if pool == "max":
        if weights is not None:
            raise ValueError("pools: a list with weights cannot have the pool 'max'; allowed: sum, mean, sqrtn")
        return segment_max(table(ids), sample_of_values(ids, offsets), offsets.shape[0] - 1)
    if is_bag:
        total: Tensor = table(ids, offsets, weights)
    else:
        rows = table(ids)
        total = _sum(rows if weights is None else rows * weights[:, None], offsets)
    if pool == "sum":
        return total
    if weights is None:
        norm = offsets.diff().to(total.dtype)
    else:
        norm = _sum(weights if pool == "mean" else weights.square(), offsets)
    safe = torch.where(norm != 0, norm, 1.0)  # so that no gradient, which may be one of weights, is NaN
    mean = total / (safe if pool == "mean" else safe.sqrt())[:, None]
    return torch.where(norm[:, None] != 0, mean, 0.0)


def _sum(values: Tensor, offsets: Tensor) -> Tensor:
    return segment_sum(values, sample_of_values(values, offsets), offsets.shape[0] - 1)
