"""Lookups on a device: by Triton kernels on CUDA, and by torch's own operations elsewhere.

Both give what ``cpp_ext/ops`` gives on the host: sums run in the order of the ids. No call waits for the device.
Needs torch alone; triton is imported where its kernels run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

SUM, MEAN, MAX = 0, 1, 2  # the modes of torch's embedding_bag
_BLOCK = 64
_MOST_COLUMNS = 128


@dataclass(frozen=True)
class Bags:
    """Where bags begin and end among the ids of a lookup.

    Attributes:
        begins: (bags + 1) int64 on the device.
        size: how many ids there are.
        length: the number of ids of each bag, where all have as many and one at least; None: they may differ.
    """

    begins: Tensor
    size: int
    length: int | None = None

    @property
    def count(self) -> int:
        """How many bags there are."""
        return self.begins.shape[0] - 1

    @functools.cached_property
    def bag_of_ids(self) -> Tensor:
        """(size) int64: the bag of each id; an id in front of the first bag counts to it."""
        places = torch.arange(self.size, device=self.begins.device)
        if self.length is not None:
            return torch.div(places, self.length, rounding_mode="floor")
        return torch.clamp(torch.searchsorted(self.begins[1:].contiguous(), places, right=True), max=self.count - 1)


def uniform_bags(count: int, length: int, device: torch.device) -> Bags:
    """``count`` bags of ``length`` ids each."""
    begins = torch.arange(count + 1, device=device) * length
    return Bags(begins, count * length, length or None)


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
    rows: Tensor, positions: Tensor, bags: Bags, *, mode: int, weights: Tensor | None = None, padding: int = -1
) -> tuple[Tensor, Tensor | None]:
    """Rows of bags, pooled.

    Args:
        rows: (u, dim) float32.
        positions: (n) int32, below u.
        bags: of the n ids.
        mode: SUM, MEAN or MAX.
        weights: (n) float32, for SUM alone.
        padding: ids at this position are left out of their bag; -1: none.

    Returns:
        (bags, dim) float32, zeros for an empty bag; for MAX the place in the ids that each value came from,
        (bags, dim) int64, -1 for an empty bag.
    """
    if runs_kernels(rows.device):
        return _pool_by_kernels(rows, positions, bags, mode, weights, padding)
    values, bag_of = rows.index_select(0, positions), bags.bag_of_ids
    if mode != MAX and weights is None and padding < 0 and bags.length is not None:  # each id counts
        out = values.new_zeros(bags.count, rows.shape[1]).index_add_(0, bag_of, values)
        return (out.div_(float(bags.length)) if mode == MEAN else out), None
    counts = (positions != padding) & _is_within(bags)
    if mode == MAX:
        return _pool_max(values, bag_of, counts, bags.count)
    if weights is not None:
        values = weights.unsqueeze(1) * values
    # The ids that do not count go to a bag of their own, behind the others.
    target = torch.where(counts, bag_of, bags.count)
    out = values.new_zeros(bags.count + 1, rows.shape[1]).index_add_(0, target, values)[: bags.count]
    if mode == MEAN:
        out = out / torch.clamp(_sizes(target, bags.count), min=1.0).unsqueeze(1)
    return out, None


def _is_within(bags: Bags) -> Tensor:
    """(n) bool: whether an id lies behind the begin of the first bag and in front of the end of the last."""
    places = torch.arange(bags.size, device=bags.begins.device)
    return (places >= bags.begins[0]) & (places < bags.begins[-1])


def _sizes(bag_of: Tensor, count: int) -> Tensor:
    """(count) float32: how many ids each bag has; ids of bag ``count`` are no one's."""
    ones = torch.ones(bag_of.shape[0], device=bag_of.device)
    return torch.zeros(count + 1, device=bag_of.device).index_add_(0, bag_of, ones)[:count]


def _pool_max(values: Tensor, bag_of: Tensor, counts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    n, dim = values.shape
    target = torch.where(counts, bag_of, count)
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
    rows: Tensor, positions: Tensor, bags: Bags, mode: int, weights: Tensor | None, padding: int
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
    if places is not None:
        pool_max_kernel[grid](rows, positions, bags.begins, out, places, padding, bags.size, dim, BLOCK_D=columns)
        return out, places
    pool_sum_kernel[grid](
        rows,
        positions,
        bags.begins,
        rows if weights is None else weights.contiguous(),
        out,
        padding,
        bags.size,
        dim,
        MEAN=mode == MEAN,
        WEIGHTED=weights is not None,
        BLOCK_D=columns,
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


def entries_of_rows(grads: Tensor, positions: Tensor, *, rows: int, padding: int = -1) -> Entries:
    """The entries of a lookup of rows.

    Args:
        grads: (n, dim) float32.
        positions: (n) int32.
        rows: of the table's pack.
        padding: ids at this position add nothing; -1: none.
    """
    kept = positions if padding < 0 else torch.where(positions == padding, rows, positions)
    return Entries(grads, kept)


def entries_of_bags(
    grads: Tensor,
    positions: Tensor,
    bags: Bags,
    *,
    rows: int,
    mode: int,
    weights: Tensor | None = None,
    padding: int = -1,
) -> Entries:
    """The entries of a pooled lookup of mode SUM or MEAN.

    Args:
        grads: (bags, dim) float32.
        positions: (n) int32.
        bags: of the n ids.
        rows: of the table's pack.
        mode: SUM or MEAN.
        weights: (n) float32, for SUM alone.
        padding: ids at this position add nothing; -1: none.
    """
    if weights is None and padding < 0 and bags.length is not None:  # each id counts
        mean = torch.full((bags.size,), 1.0 / bags.length, device=grads.device) if mode == MEAN else None
        return Entries(grads, positions, bags.bag_of_ids, mean)
    counts, bag_of = (positions != padding) & _is_within(bags), bags.bag_of_ids
    kept = torch.where(counts, positions, rows)
    scales = None if weights is None else weights.float()
    if mode == MEAN:
        sizes = _sizes(torch.where(counts, bag_of, bags.count), bags.count)
        scales = (1.0 / torch.clamp(sizes, min=1.0)).index_select(0, bag_of)
    return Entries(grads, kept, bag_of, scales)


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


def sum_entries(entries: list[Entries], rows: int, out: Tensor) -> None:
    """Sums of the entries by position, in order: of the first lookup's, then of the next one's.

    Args:
        entries: of one table; all with ``grads`` of one width.
        rows: positions of ``rows`` and above are left out.
        out: (rows, dim) float32; is written, with 0 where a position has no entry.
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

    ordered, order = torch.sort(positions, stable=True)
    begins = torch.searchsorted(ordered, torch.arange(rows + 1, device=out.device, dtype=ordered.dtype))
    dim, columns = out.shape[1], _columns(out.shape[1])
    if rows:
        sum_entries_kernel[(rows, triton.cdiv(dim, columns))](
            order,
            begins,
            order if sources is None else sources,
            grads if scales is None else scales,
            grads,
            out,
            dim,
            SOURCED=sources is not None,
            SCALED=scales is not None,
            BLOCK_D=columns,
        )


def weights_gradient(grads: Tensor, rows: Tensor, positions: Tensor, bags: Bags, *, padding: int = -1) -> Tensor:
    """The gradient of the weights of a pooled lookup of mode SUM: grads[bag] . row, 0 for padding.

    Args:
        grads: (bags, dim) float32.
        rows: (u, dim) float32.
        positions: (n) int32.
        bags: of the n ids.
        padding: ids at this position have no gradient; -1: none.

    Returns:
        (n) float32.
    """
    products = (grads.index_select(0, bags.bag_of_ids) * rows.index_select(0, positions)).sum(1)
    return torch.where((positions != padding) & _is_within(bags), products, 0.0)


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
