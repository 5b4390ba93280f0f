"""Exact retrieval over all items: where each user's item ranks, by blocks of scores in bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ...proto.errors import InvalidArgument

_BLOCK_SCORES = 1 << 24  # 64 MiB


@torch.no_grad()
def ranks_among_all(users: Tensor, items: Tensor, positives: Tensor, *, block_scores: int = _BLOCK_SCORES) -> Tensor:
    """Returns the rank of each user's item among all items by inner product, (n) int64; 0 is the best.

    The rank is the number of items with a greater score, and half of the other items with an equal one, rounded down.
    So a model that scores all items alike has the rank in the middle, and a user with a score that is NaN has the last
    rank, m - 1. The hit rate and the recall at k, of one item a
    user, are the share of ranks below k.

    Args:
        users: the vectors of users, (n, d) float32.
        items: the vectors of all items, (m, d) float32.
        positives: the number of each user's item, (n) int64 in 0 .. m-1.
        block_scores: the number of scores that are in memory at once; at least one user's items, (m), are.

    Raises:
        InvalidArgument: the shapes do not fit together, or a number of an item is out of its range.
    """
    if users.dim() != 2 or items.dim() != 2 or users.shape[1] != items.shape[1]:
        raise InvalidArgument(
            f"items: shape {tuple(items.shape)} does not fit users of {tuple(users.shape)}; allowed: (n, d) and (m, d)"
        )
    if positives.shape != users.shape[:1]:
        raise InvalidArgument(f"positives: shape {tuple(positives.shape)} is not allowed; allowed: ({len(users)},)")
    if len(positives) and not 0 <= int(positives.min()) <= int(positives.max()) < len(items):
        raise InvalidArgument(f"positives: an item is out of range; allowed: 0 .. {len(items) - 1}")
    step = max(1, block_scores // max(1, len(items)))
    ranks = torch.empty(len(users), dtype=torch.int64)
    for begin in range(0, len(users), step):
        scores = users[begin : begin + step] @ items.T
        own = scores.gather(1, positives[begin : begin + step, None])
        ties = (scores == own).sum(1) - 1
        found = (scores > own).sum(1) + ties // 2
        ranks[begin : begin + step] = found.masked_fill(scores.isnan().any(1), len(items) - 1)
    return ranks


def hit_rate(ranks: Tensor, k: int) -> float:
    """Returns the share of ranks below k; NaN without ranks."""
    return float((ranks < k).float().mean())
