"""Lookups on a device: by Triton kernels on CUDA, and by torch's own operations elsewhere.

Both give what ``cpp_ext/ops`` gives on the host: sums run in the order of the ids. No call waits for the device.
Needs torch alone; triton is imported where its kernels run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .bags import Bags

SUM, MEAN, MAX = 0, 1, 2  # the modes of torch's embedding_bag
_BLOCK = 64
_MOST_COLUMNS = 128


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there: on CUDA, and on the host where the process has chosen the interpreter."""
    if device.type == "cuda":
        return True
    if device.type != "cpu":
        return False
    try:
        from triton.runtime.interpreter import InterpretedFunction

        from . import lookup_kernels
    except ImportError:
        return False
    return isinstance(lookup_kernels.gather_kernel, InterpretedFunction)


def gather(rows: Tensor, positions: Tensor) -> Tensor:
    """Rows by position.

    Args:
        rows: (u, dim) float32.
        positions: (n) int32, below u.

    Returns:
        (n, dim) float32.
    """
    if not runs_kernels(rows.device):
        return rows.index_select(0, positions)
    import triton

    from .lookup_kernels import gather_kernel

    n, dim = positions.shape[0], rows.shape[1]
    out = torch.empty(n, dim, device=rows.device)
    columns = _columns(dim)
    if n:
        grid = (triton.cdiv(n, _BLOCK), triton.cdiv(dim, columns))
        gather_kernel[grid](rows, positions, out, n, dim, BLOCK=_BLOCK, BLOCK_D=columns)
    return out


def pool(
    rows: Tensor,
    positions: Tensor,
    bags: Bags,
    *,
    mode: int,
    weights: Tensor | None = None,
    paddings: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rows of bags, pooled.

    Args:
        rows: (u, dim) float32.
        positions: (n) int32, below u.
        bags: of the n ids.
        mode: SUM, MEAN or MAX.
        weights: (n) float32, for SUM alone.
        paddings: (bags) int32: ids at this position are left out of a bag, -1: none; None: of no bag.

    Returns:
        (bags, dim) float32, zeros for an empty bag; for MAX the place in the ids that each value came from,
        (bags, dim) int64, -1 for an empty bag.
    """
    if runs_kernels(rows.device):
        return _pool_by_kernels(rows, positions, bags, mode, weights, paddings)
    count, dim = bags.count, rows.shape[1]
    if count == 0:
        places = torch.empty(0, dim, dtype=torch.int64, device=rows.device) if mode == MAX else None
        return rows.new_zeros(0, dim), places
    values, bag_of, counts = rows.index_select(0, positions), bags.bag_of_ids, _counting(positions, bags, paddings)
    # The ids that do not count go to a bag of their own, behind the others.
    target = bag_of if counts is None else torch.where(counts, bag_of, count)
    if mode == MAX:
        return _pool_max(values, target, count)
    if weights is not None:
        values = weights.unsqueeze(1) * values
    out = values.new_zeros(count + (counts is not None), dim).index_add_(0, target, values)[:count]
    if mode == MEAN:
        out = out / float(bags.length) if counts is None and bags.length else out / _sizes(bags, target, paddings)
    return out, None


def _counting(positions: Tensor, bags: Bags, paddings: Tensor | None) -> Tensor | None:
    """(n) bool: whether an id counts for its bag; None: each does."""
    counts = None if bags.is_whole else bags.is_in_bag
    if paddings is None:
        return counts
    is_kept = positions != paddings.index_select(0, bags.bag_of_ids)
    return is_kept if counts is None else counts & is_kept


def _sizes(bags: Bags, target: Tensor, paddings: Tensor | None) -> Tensor:
    """(bags, 1) float32: how many ids of each bag count, and 1 where none does; ``target`` is the bag of each id."""
    if paddings is None:
        return bags.lengths
    ones = torch.ones(target.shape[0], device=target.device)
    sizes = torch.zeros(bags.count + 1, device=target.device).index_add_(0, target, ones)[: bags.count]
    return torch.clamp(sizes, min=1.0).unsqueeze(1)


def _pool_max(values: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
    n, dim = values.shape
    best = values.new_full((count + 1, dim), float("-inf"))
    best = best.index_reduce_(0, target, values, "amax")
    # The first id of a bag whose value is the largest: the smallest place among those.
    places = torch.arange(n, device=values.device).unsqueeze(1).expand(n, dim)
    is_best = values == best.index_select(0, target)
    candidates = torch.where(is_best, places, n)
    first = torch.full((count + 1, dim), n, dtype=torch.int64, device=values.device)
    first = first.index_reduce_(0, target, candidates, "amin")[:count]
    is_empty = first == n
    return torch.where(is_empty, 0.0, best[:count]), torch.where(is_empty, -1, first)


def _pool_by_kernels(
    rows: Tensor, positions: Tensor, bags: Bags, mode: int, weights: Tensor | None, paddings: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    import triton

    from .lookup_kernels import pool_max_kernel, pool_sum_kernel

    dim = rows.shape[1]
    out = torch.zeros(bags.count, dim, device=rows.device)
    places = torch.full((bags.count, dim), -1, dtype=torch.int64, device=rows.device) if mode == MAX else None
    if bags.count == 0 or bags.size == 0:
        return out, places
    columns = _columns(dim)
    grid = (bags.count, triton.cdiv(dim, columns))
    padded = {"PADDED": paddings is not None, "BLOCK_D": columns}
    of_bags = bags.begins if paddings is None else paddings
    if places is not None:
        pool_max_kernel[grid](rows, positions, bags.begins, bags.ends, of_bags, out, places, bags.size, dim, **padded)
        return out, places
    pool_sum_kernel[grid](
        rows,
        positions,
        bags.begins,
        bags.ends,
        of_bags,
        rows if weights is None else weights.contiguous(),
        out,
        bags.size,
        dim,
        MEAN=mode == MEAN,
        WEIGHTED=weights is not None,
        **padded,
    )
    return out, None


@dataclass(frozen=True)
class Entries:
    """What the gradient of a lookup adds to the sums of a table: an entry for each id that counts.

    Attributes:
        grads: (m, dim) float32.
        positions: (n) int32: the row that an entry is added to; ids that do not count have the number of rows.
        sources: (n) int64: the row of ``grads`` that is added; None: entry i adds row i.
        scales: (n) float32: what it is multiplied by; None: 1.
    """

    grads: Tensor
    positions: Tensor
    sources: Tensor | None = None
    scales: Tensor | None = None


def entries_of_rows(grads: Tensor, positions: Tensor, *, rows: int, paddings: Tensor | None = None) -> Entries:
    """The entries of a lookup of rows.

    Args:
        grads: (n, dim) float32.
        positions: (n) int32.
        rows: of the table's pack.
        paddings: (n) int32: an id at this position adds nothing, -1: none; None: every id adds.
    """
    return Entries(grads, positions if paddings is None else torch.where(positions == paddings, rows, positions))


def entries_of_bags(
    grads: Tensor,
    positions: Tensor,
    bags: Bags,
    *,
    rows: int,
    mode: int,
    weights: Tensor | None = None,
    paddings: Tensor | None = None,
) -> Entries:
    """The entries of a pooled lookup of mode SUM or MEAN.

    Args:
        grads: (bags, dim) float32.
        positions: (n) int32.
        bags: of the n ids.
        rows: of the table's pack.
        mode: SUM or MEAN.
        weights: (n) float32, for SUM alone.
        paddings: (bags) int32: ids at this position add nothing, -1: none; None: of no bag.
    """
    if bags.count == 0:  # no id lies in a bag
        return Entries(grads, positions[:0])
    bag_of, counts = bags.bag_of_ids, _counting(positions, bags, paddings)
    scales = None if weights is None else weights.float()
    if mode == MEAN and counts is None and bags.length:
        scales = torch.full((bags.size,), 1.0 / bags.length, device=grads.device)
    elif mode == MEAN:
        target = bag_of if counts is None else torch.where(counts, bag_of, bags.count)
        scales = (1.0 / _sizes(bags, target, paddings)).squeeze(1).index_select(0, bag_of)
    return Entries(grads, positions if counts is None else torch.where(counts, positions, rows), bag_of, scales)


def entries_of_max(grads: Tensor, positions: Tensor, places: Tensor, *, rows: int) -> Entries:
    """The entries of a pooled lookup of mode MAX, a column each: sums of them are (rows * dim, 1).

    Args:
        grads: (bags, dim) float32.
        positions: (n) int32.
        places: (bags, dim) int64, as :func:`pool` returned it.
        rows: of the table's pack.
    """
    dim = grads.shape[1]
    columns = torch.arange(dim, device=grads.device).expand_as(places)
    if positions.shape[0] == 0:
        cells = torch.full((places.numel(),), rows * dim, dtype=torch.int64, device=grads.device)
    else:
        at = positions.index_select(0, torch.clamp(places, min=0).reshape(-1)).to(torch.int64)
        cells = torch.where(places.reshape(-1) >= 0, at * dim + columns.reshape(-1), rows * dim)
    return Entries(grads.reshape(-1, 1), cells)


def sum_entries(entries: list[Entries], rows: int, out: Tensor, order: tuple[Tensor, Tensor] | None = None) -> None:
    """Sums of the entries by position, in order: of the first lookup's, then of the next one's.

    Args:
        entries: of one table; all with ``grads`` of one width.
        rows: positions of ``rows`` and above are left out.
        out: (rows, dim) float32; is written, with 0 where a position has no entry.
        order: the entries of each position, where they are known: (rows + 1) integers, where those of a position
            begin, and (entries) integers, ascending for each position. None: they are sorted here.
    """
    grads, positions = joined([one.grads for one in entries]), joined([one.positions for one in entries])
    sources, scales = _joined_sources(entries), None
    if any(one.scales is not None for one in entries):
        scales = joined([
            torch.ones(one.positions.shape[0], device=grads.device) if one.scales is None else one.scales
            for one in entries
        ])  # fmt: skip
    if not runs_kernels(out.device):
        values = grads if sources is None else grads.index_select(0, sources)
        values = values if scales is None else scales.unsqueeze(1) * values
        out.copy_(torch.zeros(rows + 1, out.shape[1], device=out.device).index_add_(0, positions, values)[:rows])
        return
    import triton

    from .lookup_kernels import sum_entries_kernel

    if order is None:
        ordered, places = torch.sort(positions, stable=True)
        begins = torch.searchsorted(ordered, torch.arange(rows + 1, device=out.device, dtype=ordered.dtype))
    else:
        begins, places = order
    dim, columns = out.shape[1], _columns(out.shape[1])
    if rows:
        sum_entries_kernel[(rows, triton.cdiv(dim, columns))](
            places,
            begins,
            places if sources is None else sources,
            grads if scales is None else scales,
            grads,
            out,
            dim,
            SOURCED=sources is not None,
            SCALED=scales is not None,
            BLOCK_D=columns,
        )


def weights_gradient(
    grads: Tensor, rows: Tensor, positions: Tensor, bags: Bags, *, paddings: Tensor | None = None
) -> Tensor:
    """The gradient of the weights of a pooled lookup of mode SUM: grads[bag] . row, 0 for padding.

    Args:
        grads: (bags, dim) float32.
        rows: (u, dim) float32.
        positions: (n) int32.
        bags: of the n ids.
        paddings: (bags) int32: ids at this position have no gradient, -1: none; None: of no bag.

    Returns:
        (n) float32.
    """
    if bags.count == 0:
        return torch.zeros(positions.shape[0], device=rows.device)
    products = (grads.index_select(0, bags.bag_of_ids) * rows.index_select(0, positions)).sum(1)
    counts = _counting(positions, bags, paddings)
    return products if counts is None else torch.where(counts, products, 0.0)


def _joined_sources(entries: list[Entries]) -> Tensor | None:
    """The row of the joined gradients that each entry adds; None: entry i adds row i."""
    if all(one.sources is None for one in entries):
        return None
    sources, first = [], 0
    for one in entries:
        n, device = one.positions.shape[0], one.grads.device
        if one.sources is None:
            sources.append(torch.arange(first, first + n, device=device))
        else:
            sources.append(one.sources + first if first else one.sources)
        first += one.grads.shape[0]
    return joined(sources)


def joined(parts: list[Tensor]) -> Tensor:
    """Tensors one behind the other along their first dimension; nothing is copied where they lie so in memory."""
    first, end = parts[0], 0
    if len(parts) > 1:
        memory = first.untyped_storage()._cdata
        for part in parts:
            if part.untyped_storage()._cdata != memory or not part.is_contiguous():
                return torch.cat(parts)
            if end and part.storage_offset() != end:
                return torch.cat(parts)
            end = int(part.storage_offset()) + part.numel()
        n = sum(part.shape[0] for part in parts)
        return first.as_strided((n, *first.shape[1:]), first.stride(), first.storage_offset())
    return first.contiguous()


def _columns(dim: int) -> int:
    return min(1 << max(dim - 1, 0).bit_length(), _MOST_COLUMNS)
