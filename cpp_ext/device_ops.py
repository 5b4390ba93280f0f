"""The ops ``gather_all``, ``stage_all`` and ``gather_merged`` on a device; on the host they stay in C++ (cpp_ext/ops).

Gathering, pooling and sums by position run on the device (cpp_ext/device/lookup_math.py). cpp_ext/torch_ops.py
registers them with torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .device import lookup_math as math
from .device_pack import DevicePack, PackGradient
from .device_step import FoundLookup, step_of

_ROWS_OF_IDS = -1  # the mode of a lookup without bags (cpp_ext/ops/merged_lookups.h)
_OPTIONS = 6  # numbers a lookup


@dataclass(frozen=True)
class _Options:
    """The numbers of one lookup, as ``cpp_ext/ops/merged_lookups.h`` lists them."""

    dim: int
    mode: int
    padding: int
    includes_last: int
    has_offsets: int
    has_weights: int


def _options_of(options: Sequence[int], n: int) -> list[_Options]:
    return [_Options(*options[i * _OPTIONS : (i + 1) * _OPTIONS]) for i in range(n)]


def _bags_of(options: _Options, ids: Tensor, offsets: Tensor, device: torch.device) -> math.Bags:
    return bags_of(ids, offsets if options.has_offsets else None, bool(options.includes_last), device)


def bags_of(ids: Tensor, offsets: Tensor | None, includes_last: bool, device: torch.device) -> math.Bags:
    """The bags of a pooled lookup, on the device.

    Args:
        ids: the ids, (bags, length), or (n) with offsets.
        offsets: where each bag begins, (bags) or (bags + 1); None: the ids have two dimensions.
        includes_last: whether the offsets end with the number of ids.
        device: the device of the result.

    Raises:
        ValueError: the shapes do not fit together, or offsets are no integers, or, on the host, out of order or without
            the number of ids at their end.
    """
    if offsets is None:
        if ids.dim() != 2:
            raise ValueError(
                f"InvalidArgument: gather_all: ids must be 2-D without offsets or 1-D with 1-D offsets; ids are "
                f"{ids.dim()}-D without offsets"
            )
        return math.uniform_bags(ids.shape[0], ids.shape[1], device)
    if ids.dim() != 1 or offsets.dim() != 1:
        raise ValueError(
            f"InvalidArgument: gather_all: ids must be 2-D without offsets or 1-D with 1-D offsets; ids are "
            f"{ids.dim()}-D and offsets {offsets.dim()}-D"
        )
    if offsets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"InvalidArgument: gather_bag.offsets.dtype: '{offsets.dtype}' is not allowed; allowed: int64, int32"
        )
    n = ids.numel()
    if offsets.device.type == "cpu":
        _check_offsets(offsets, n, includes_last)
    begins = offsets.to(device, torch.int64)
    if not includes_last:
        begins = torch.cat([begins, torch.full((1,), n, dtype=torch.int64, device=device)])
    return math.Bags(begins, n)


def _check_offsets(offsets: Tensor, n: int, includes_last: bool) -> None:
    values = offsets.to(torch.int64)
    is_bad = torch.diff(values, prepend=values.new_zeros(1)) < 0
    is_bad |= values > n
    if len(values):
        is_bad[0] |= values[0] != 0
    if bool(is_bad.any()):
        at = int(torch.nonzero(is_bad)[0])
        raise ValueError(
            f"InvalidArgument: gather_bag.offsets[{at}]: {int(values[at])} is not allowed; allowed: 0 first, then not "
            f"falling, at most {n}"
        )
    if includes_last and (len(values) == 0 or int(values[-1]) != n):
        raise ValueError(
            f"InvalidArgument: gather_bag.offsets[{len(values) - 1}]: {values[-1:].tolist()} is not allowed; allowed: "
            f"{n}, the number of ids, as the last one with include_last_offset"
        )


def gather_all(
    ids: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
    anchor: Tensor,
    tables: str,
    options: list[int],
    train: bool,
) -> list[Tensor]:
    """The op ``sparserow::gather_all`` for an anchor on a device; see ``cpp_ext/ops/gather_merged.h``."""
    names, device = tables.split("\n"), anchor.device
    step = step_of(names[0])
    found = step.find(names, ids, device, train=train, with_gradient=anchor.numel() > 0)
    lookups = _options_of(options, len(ids))
    out: dict[int, Tensor] = {}
    places = []
    for kind, numbers in _groups_of(dict(enumerate(found)), lookups, ids, with_gradient=False):
        first = found[numbers[0]]
        pack, run = first.pack, first.pack.run_of(first.part)
        if kind is not None:
            positions = math.joined([pack.positions(found[i].part) for i in numbers])
            out.update(_made_together(kind, pack.rows(run), positions, numbers, ids, device))
            continue
        (i,), (lookup,) = numbers, [lookups[i] for i in numbers]
        if lookup.mode == _ROWS_OF_IDS:
            rows = math.gather(pack.rows(run), pack.positions(first.part))
            out[i] = rows.view(*ids[i].shape, lookup.dim)
            continue
        out[i], place = math.pool(
            pack.rows(run),
            pack.positions(first.part),
            _bags_of(lookup, ids[i], offsets[i] if lookup.has_offsets else ids[i], device),
            mode=lookup.mode,
            weights=weights[i].reshape(-1).to(device, torch.float32) if lookup.has_weights else None,
            padding=_padding_position(first, lookup),
        )
        if place is not None:
            places.append(place)
    return [out[i] for i in range(len(ids))] + places


@dataclass(frozen=True)
class _Kind:
    """Lookups that one operation serves: of one run of a pack, without weights and padding.

    Attributes:
        pack: the pack.
        run: the run of the pack, so that all rows have one width.
        mode: how bags are pooled; _ROWS_OF_IDS: there are none.
        length: the ids of each bag; 0 without bags.
    """

    pack: DevicePack
    run: int
    mode: int
    length: int


def _kind_of(found: FoundLookup, lookup: _Options, ids: Tensor, *, with_gradient: bool) -> _Kind | None:
    """Returns what a lookup has in common with those that are made together with it; None: it is made alone.

    The rows of ids are the same with padding, which has no gradient; bags leave it out.
    """
    is_bag = lookup.mode != _ROWS_OF_IDS
    has_padding = lookup.padding >= 0 and (is_bag or with_gradient)
    is_plain = not (has_padding or lookup.has_offsets or lookup.has_weights)
    run = found.pack.run_of(found.part)
    if not is_bag:
        return _Kind(found.pack, run, lookup.mode, 0) if is_plain else None
    has_lengths = ids.dim() == 2 and ids.shape[1] > 0 and lookup.mode != math.MAX
    return _Kind(found.pack, run, lookup.mode, ids.shape[1]) if is_plain and has_lengths else None


def _groups_of(
    found: Mapping[int, FoundLookup], lookups: Sequence[_Options], ids: Sequence[Tensor], *, with_gradient: bool
) -> list[tuple[_Kind | None, list[int]]]:
    """Returns the lookups that are made together, by their numbers in ascending order.

    Gradients of a row are added in the order of the lookups. So where several read one table, neighbours alone are made
    together.

    Args:
        found: the place of lookups in a pack, by their numbers in ascending order.
        lookups: the options of all.
        ids: the ids of all.
        with_gradient: whether it is their gradients that are made.
    """
    is_free = len({(each.pack, each.pack.table_of(each.part)) for each in found.values()}) == len(found)
    groups: list[tuple[_Kind | None, list[int]]] = []
    of_kind: dict[_Kind, list[int]] = {}
    for i in found:
        kind = _kind_of(found[i], lookups[i], ids[i], with_gradient=with_gradient)
        group = None if kind is None else of_kind.get(kind)
        if group is None or not (is_free or groups[-1][1] is group):
            group = []
            groups.append((kind, group))
            if kind is not None:
                of_kind[kind] = group
        group.append(i)
    return groups


def _made_together(
    kind: _Kind, rows: Tensor, positions: Tensor, numbers: Sequence[int], ids: Sequence[Tensor], device: torch.device
) -> dict[int, Tensor]:
    """Returns the output of each lookup of a kind, all of one operation."""
    if kind.mode == _ROWS_OF_IDS:
        made, sizes = math.gather(rows, positions), [ids[i].numel() for i in numbers]
        shapes = [(*ids[i].shape, rows.shape[1]) for i in numbers]
    else:
        sizes = [ids[i].shape[0] for i in numbers]
        made, _ = math.pool(rows, positions, math.uniform_bags(sum(sizes), kind.length, device), mode=kind.mode)
        shapes = [(size, rows.shape[1]) for size in sizes]
    parts = made.split(sizes) if len(sizes) > 1 else [made]
    return {i: part.view(shape) for i, part, shape in zip(numbers, parts, shapes, strict=True)}


def gather_merged(
    ids: list[Tensor], offsets: list[Tensor], weights: list[Tensor], tables: str, options: list[int]
) -> list[Tensor]:
    """The op ``sparserow::gather_merged`` for ids on a device: rows of all lookups cross in one copy."""
    anchor = torch.zeros(0, device=next(each.device for each in ids if each.device.type != "cpu"))
    return gather_all(ids, offsets, weights, anchor, tables, options, False)[: len(ids)]


def _padding_position(found: FoundLookup, lookup: _Options) -> int:
    return -1 if lookup.padding < 0 else found.pack.native.position_of(found.part, lookup.padding)


def stage_all(
    grads: list[Tensor],
    ids: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
    places: list[Tensor],
    tables: str,
    options: list[int],
    wants: list[int],
) -> list[Tensor]:
    """The op ``sparserow::stage_all`` for gradients on a device: they are kept there until the step ends."""
    names, device = tables.split("\n"), grads[0].device
    step, lookups = step_of(names[0]), _options_of(options, len(ids))
    made: dict[int, Tensor] = {}
    of_max = dict(zip([i for i, lookup in enumerate(lookups) if lookup.mode == math.MAX], places, strict=False))
    # No gradient has reached a lookup whose gradient has one dimension; that of an empty batch has two.
    reached = [i for i in range(len(ids)) if grads[i].shape != (0,)]
    found = {i: step.recall(names[i], ids[i], device) for i in reached}
    for kind, numbers in _groups_of(found, lookups, ids, with_gradient=True):
        first = found[numbers[0]]
        pack, run = first.pack, first.pack.run_of(first.part)
        rows = pack.runs[run][0]
        parts = tuple((found[i].part, lookups[i].padding) for i in numbers)
        if kind is not None:
            grad = math.joined([grads[i].float().reshape(-1, pack.runs[run][1]) for i in numbers])
            positions = math.joined([pack.positions(found[i].part) for i in numbers])
            if kind.mode == _ROWS_OF_IDS:
                entries = math.entries_of_rows(grad, positions, rows=rows)
            else:
                bags = math.uniform_bags(grad.shape[0], kind.length, device)
                entries = math.entries_of_bags(grad, positions, bags, rows=rows, mode=kind.mode)
            step.note_gradient(first, PackGradient(parts, entries, is_by_column=False))
            continue
        (i,), (lookup,) = numbers, [lookups[i] for i in numbers]
        padding, positions, grad = _padding_position(first, lookup), pack.positions(first.part), grads[i].float()
        place = of_max.get(i)
        if lookup.mode == _ROWS_OF_IDS:
            grad = grad.reshape(-1, lookup.dim)
            entries = math.entries_of_rows(grad.contiguous(), positions, rows=rows, padding=padding)
        elif place is not None:
            begin, own = pack.own_rows_of(first.part)
            entries = math.entries_of_max(grad.contiguous(), positions - begin, place, rows=own)
        else:
            bags = _bags_of(lookup, ids[i], offsets[i] if lookup.has_offsets else ids[i], device)
            flat = weights[i].reshape(-1).to(device, torch.float32) if lookup.has_weights else None
            entries = math.entries_of_bags(
                grad.contiguous(), positions, bags, rows=rows, mode=lookup.mode, weights=flat, padding=padding
            )
            if wants[i]:
                of_flat = math.weights_gradient(grad, pack.rows(run), positions, bags, padding=padding)
                made[i] = of_flat.view(weights[i].shape).to(weights[i])
        step.note_gradient(first, PackGradient(parts, entries, is_by_column=place is not None))
    of_weights = [made[i] if i in made else torch.zeros_like(weights[i]) for i in range(len(ids)) if wants[i]]
    return [torch.zeros(1, device=device), *of_weights]
