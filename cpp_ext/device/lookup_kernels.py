"""Triton kernels of lookups on a device: rows by position, pooled rows of bags, and sums of gradients by position.

Sums run in the order of the ids, as in ``cpp_ext/ops``: a kernel under Triton's interpreter gives the same bits.
A position is int32 and names a row of a packed table. Needs torch and triton alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"])
def gather_kernel(rows, positions, out, n, dim, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """out (n, dim) = rows[positions]; one program for BLOCK ids and BLOCK_D columns."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    position = tl.load(positions + at, mask=at < n, other=0).to(tl.int64)
    mask = (at < n)[:, None] & (column < dim)[None, :]
    row = tl.load(rows + position[:, None] * dim + column[None, :], mask=mask)
    tl.store(out + at.to(tl.int64)[:, None] * dim + column[None, :], row, mask=mask)


@triton.jit(do_not_specialize=["n"])
def pool_sum_kernel(
    rows, positions, begins, ends, paddings, weights, out, n, dim, MEAN: tl.constexpr, WEIGHTED: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a bag and BLOCK_D columns: the sum or mean of the bag's rows.

    begins, ends: (bags) int64; what lies outside [0, n] is taken as the nearest end. paddings: (bags) int32 where
    PADDED: rows at this position are left out.
    """
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = column < dim
    begin = tl.minimum(tl.maximum(tl.load(begins + bag), 0), n)
    end = tl.minimum(tl.maximum(tl.load(ends + bag), begin), n)
    padding = tl.load(paddings + bag).to(tl.int64) if PADDED else begin * 0 - 1
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    count = begin * 0
    for i in range(begin, end):
        position = tl.load(positions + i).to(tl.int64)
        counts = position != padding
        row = tl.load(rows + position * dim + column, mask=mask, other=0.0)
        if WEIGHTED:
            row = tl.load(weights + i) * row
        total = tl.where(counts, total + row, total)
        count += counts.to(tl.int64)
    if MEAN:
        total = tl.where(count > 0, total / tl.maximum(count, 1).to(tl.float32), total)
    tl.store(out + bag * dim + column, total, mask=mask)


@triton.jit(do_not_specialize=["n"])
def pool_max_kernel(
    rows, positions, begins, ends, paddings, out, places, n, dim, PADDED: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One program a bag and BLOCK_D columns: the largest value of each column, and the place in the ids it came from.

    An empty bag gives 0 and place -1. Of equal values the first counts. Bags and paddings as in pool_sum_kernel.
    """
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = column < dim
    begin = tl.minimum(tl.maximum(tl.load(begins + bag), 0), n)
    end = tl.minimum(tl.maximum(tl.load(ends + bag), begin), n)
    padding = tl.load(paddings + bag).to(tl.int64) if PADDED else begin * 0 - 1
    best = tl.zeros([BLOCK_D], dtype=tl.float32)
    place = tl.full([BLOCK_D], -1, dtype=tl.int64)
    for i in range(begin, end):
        position = tl.load(positions + i).to(tl.int64)
        row = tl.load(rows + position * dim + column, mask=mask, other=0.0)
        wins = (position != padding) & ((place < 0) | (row > best))
        best = tl.where(wins, row, best)
        place = tl.where(wins, i, place)
    tl.store(out + bag * dim + column, best, mask=mask)
    tl.store(places + bag * dim + column, place, mask=mask)


@triton.jit
def sum_entries_kernel(
    order, begins, sources, scales, grads, sums, dim, SOURCED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a position and BLOCK_D columns: its entries are order[begins[p]:begins[p + 1]], added in order.

    An entry adds grads[sources[entry]], or grads[entry] unless SOURCED, times scales[entry] where SCALED. A position
    without an entry gets 0.
    """
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = column < dim
    begin, end = tl.load(begins + position), tl.load(begins + position + 1)
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i in range(begin, end):
        entry = tl.load(order + i)
        source = tl.load(sources + entry).to(tl.int64) if SOURCED else entry.to(tl.int64)
        grad = tl.load(grads + source * dim + column, mask=mask, other=0.0)
        if SCALED:
            grad = tl.load(scales + entry) * grad
        total = tl.where(i == begin, grad, total + grad)
    tl.store(sums + position * dim + column, total, mask=mask)
