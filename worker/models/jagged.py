"""Computes with lists of different lengths that are stored one behind the other, without padding.

A list feature is a tuple of values (m), offsets (B + 1) int64 and optionally weights (m) float32. The values of sample
b are ``values[offsets[b]:offsets[b + 1]]``. A list may be empty, and so may the batch. Shapes depend on shapes alone,
so that torch can compile and export what is made of these functions.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Feature: TypeAlias = "Tensor | tuple[Tensor, ...]"  # a number or key of each sample, or a list of each


def sample_of_values(values: Tensor, offsets: Tensor) -> Tensor:
    """Returns the number of the sample to which each value belongs, (m) int64.

    Args:
        values: anything with one row a value, (m, ...).
        offsets: where the values of each sample begin, and the end, (B + 1) int64.
    """
    samples = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return torch.repeat_interleave(samples, offsets.diff(), output_size=values.shape[0])


def segment_sum(rows: Tensor, samples: Tensor, count: int) -> Tensor:
    """Returns the sums of rows by sample, (count, ...); zeros for a sample that has none.

    Args:
        rows: the rows to add, (m, ...).
        samples: the sample of each row, (m) int64 in [0, count).
        count: the number of samples.
    """
    return rows.new_zeros(count, *rows.shape[1:]).index_add(0, samples, rows)


def segment_max(rows: Tensor, samples: Tensor, count: int) -> Tensor:
    """Returns the largest value of each column by sample, (count, ...); zeros for a sample that has none.

    Args:
        rows: the rows to compare, (m, ...).
        samples: the sample of each row, (m) int64 in [0, count).
        count: the number of samples.
    """
    where = samples.reshape(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
    return rows.new_zeros(count, *rows.shape[1:]).scatter_reduce(0, where, rows, "amax", include_self=False)


def segment_softmax(scores: Tensor, samples: Tensor, count: int) -> Tensor:
    """Returns scores that are normalised within each sample: positive, with sum 1.

    Args:
        scores: the scores, (m).
        samples: the sample of each score, (m) int64 in [0, count).
        count: the number of samples.
    """
    # Subtracting the largest score of the sample changes no result, and keeps exp finite.
    exponents = torch.exp(scores - segment_max(scores.detach(), samples, count)[samples])
    return exponents / segment_sum(exponents, samples, count)[samples]


def padded(values: Tensor, offsets: Tensor, length: int, *, keep_last: bool = False) -> tuple[Tensor, Tensor]:
    """Returns lists as a rectangle of a fixed width, and which of its places hold a value.

    Values begin at place 0. A list longer than ``length`` loses its end, or its beginning with ``keep_last``.

    Args:
        values: the values, (m, ...).
        offsets: where the values of each sample begin, and the end, (B + 1) int64.
        length: the width of the rectangle.
        keep_last: which end of a long list is kept.

    Returns:
        The rectangle, (B, length, ...), with zeros where there is no value; and (B, length) bool, whether there is one.
    """
    begin, end = offsets[:-1], offsets[1:]
    if keep_last:
        begin = torch.maximum(begin, end - length)
    places = begin[:, None] + torch.arange(length, device=offsets.device)
    is_there = places < end[:, None]
    return _or_zeros(values, places, is_there), is_there


def aligned(values: Tensor, offsets: Tensor, samples: Tensor, places: Tensor) -> Tensor:
    """Returns the values at given places of lists, (n, ...), with zeros where a list has no such place.

    Lists that always have the same lengths have sizes that vary apart from each other in a program that torch exports.
    This function joins them.

    Args:
        values: the values of all lists, (m, ...).
        offsets: where each list begins, and the end, (B + 1) int64.
        samples: the lists, (n) int64.
        places: the place in each of these lists, from 0, (n) int64.
    """
    where = offsets[samples] + places
    return _or_zeros(values, where, where < offsets[samples + 1])


def _or_zeros(values: Tensor, places: Tensor, is_there: Tensor) -> Tensor:
    """Returns ``values[places]``, with zeros where there is no value. There may be no values at all."""
    behind = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return behind[torch.where(is_there, places, values.shape[0])]
