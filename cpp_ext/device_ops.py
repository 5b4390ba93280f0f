"""The ops ``gather_all``, ``stage_all`` and ``gather_merged`` on a device; on the host they stay in C++ (cpp_ext/ops).

Gathering, pooling and sums by position run on the device (cpp_ext/device/lookup_math.py). cpp_ext/torch_ops.py
registers them with torch.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    out = _rows_of_ids(found, lookups, ids)
    places = []
    for i, (each, lookup) in enumerate(zip(found, lookups, strict=True)):
        if lookup.mode == _ROWS_OF_IDS:
            continue
        pooled, place = math.pool(
            each.pack.rows(each.pack.run_of(each.part)),
            each.pack.positions(each.part),
            _bags_of(lookup, ids[i], offsets[i] if lookup.has_offsets else ids[i], device),
            mode=lookup.mode,
            weights=weights[i].reshape(-1).to(device, torch.float32) if lookup.has_weights else None,
            padding=_padding_position(each, lookup),
        )
        out[i] = pooled
        if place is not None:
            places.append(place)
    return [out[i] for i in range(len(ids))] + places


def _rows_of_ids(found: list[FoundLookup], lookups: list[_Options], ids: list[Tensor]) -> dict[int, Tensor]:
    """The rows of the lookups without bags, by their number; those of one width of one pack are gathered together."""
    together: dict[tuple[DevicePack, int], list[int]] = {}
    for i, (each, lookup) in enumerate(zip(found, lookups, strict=True)):
        if lookup.mode == _ROWS_OF_IDS:
            together.setdefault((each.pack, each.pack.run_of(each.part)), []).append(i)
    out = {}
    for (pack, run), numbers in together.items():
        rows = math.gather(pack.rows(run), math.joined([pack.positions(found[i].part) for i in numbers]))
        parts = rows.split([ids[i].numel() for i in numbers]) if len(numbers) > 1 else [rows]
        for i, part in zip(numbers, parts, strict=True):
            out[i] = part.view(*ids[i].shape, lookups[i].dim)
    return out


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
    out, left = [torch.zeros(1, device=device)], list(places)
    for i, lookup in enumerate(lookups):
        place = left.pop(0) if lookup.mode == math.MAX else None
        if grads[i].shape == (0,):  # no gradient reached the lookup; that of an empty batch has two dimensions
            if wants[i]:
                out.append(torch.zeros_like(weights[i]))
            continue
        found = step.recall(names[i], ids[i], device)
        run, padding = found.pack.run_of(found.part), _padding_position(found, lookup)
        rows, positions, grad = found.pack.runs[run][0], found.pack.positions(found.part), grads[i].float()
        if lookup.mode == _ROWS_OF_IDS:
            grad = grad.reshape(-1, lookup.dim)
            entries = math.entries_of_rows(grad.contiguous(), positions, rows=rows, padding=padding)
        elif place is not None:
            first, own = found.pack.own_rows_of(found.part)
            entries = math.entries_of_max(grad.contiguous(), positions - first, place, rows=own)
        else:
            bags = _bags_of(lookup, ids[i], offsets[i] if lookup.has_offsets else ids[i], device)
            flat = weights[i].reshape(-1).to(device, torch.float32) if lookup.has_weights else None
            entries = math.entries_of_bags(
                grad.contiguous(), positions, bags, rows=rows, mode=lookup.mode, weights=flat, padding=padding
            )
            if wants[i]:
                made = math.weights_gradient(grad, found.pack.rows(run), positions, bags, padding=padding)
                out.append(made.view(weights[i].shape).to(weights[i]))
        gradient = PackGradient(found.part, lookup.padding, entries, is_by_column=place is not None)
        step.note_gradient(found, gradient)
    return out
