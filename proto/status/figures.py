"""Quantiles of histograms, and how uneven values are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence


def quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """Returns the ``q``-quantile of a histogram, interpolated linearly within its bucket.

    Args:
        bounds: the upper ends of the buckets, ascending.
        counts: the count of each bucket; one more than there are bounds.
        q: the quantile, in [0, 1].

    Returns:
        None for an empty histogram; infinity when the quantile is beyond the last bound.
    """
    total = sum(counts)
    if total == 0:
        return None
    rank, below = q * total, 0
    for low, high, count in zip([0.0, *bounds], bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below += count
    return float("inf")


def step_quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """Returns the upper end of the quantile's bucket, for whole steps and for bounds; None for an empty histogram."""
    rank = q * sum(counts)
    for bound, total in zip(bounds, itertools.accumulate(counts), strict=True):
        if total and total >= rank:
            return bound
    return None


def skew(values: Sequence[float]) -> float | None:
    """Returns the largest value over the mean; None when there are no values, or all are 0."""
    mean = sum(values) / len(values) if values else 0.0
    return max(values) / mean if mean > 0 else None


def measured(values: Iterable[float | None]) -> list[float]:
    """Returns the values that are known."""
    return [value for value in values if value is not None]
