"""Lookups of a step that one operation serves: of one width, and alike in how ids are pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .device import lookup_math as math
from .device.bags import Bags, fixed_bags, lookup_of
from .device.link import link_of
from .device_pack import FoundPart, PackGradient

ROWS_OF_IDS = -1  # the mode of a lookup without bags (cpp_ext/ops/merged_lookups.h)


@dataclass(frozen=True)
class LookupOptions:
    """The numbers of one lookup, as ``cpp_ext/ops/merged_lookups.h`` lists them."""

    dim: int
    mode: int
    padding: int
    includes_last: int
    has_offsets: int
    has_weights: int


@dataclass(frozen=True)
class Lookups:
    """The lookups of one call; lists have an item of each.

    Attributes:
        found: the rows of each.
        options: how ids are pooled.
        ids: of any shape.
        offsets, weights: what the options say that a lookup does not have is not looked at.
    """

    found: Sequence[FoundPart]
    options: Sequence[LookupOptions]
    ids: Sequence[Tensor]
    offsets: Sequence[Tensor]
    weights: Sequence[Tensor]


def groups_of(lookups: Lookups, numbers: Sequence[int]) -> list[LookupGroup]:
    """Returns lookups in groups, each of which one operation serves.

    Gradients of a row are added in the order of the lookups. So where several read one table, neighbours alone are made
    together, and those of mode max by themselves.

    Args:
        lookups: of a call.
        numbers: of them, in ascending order.
    """
    found, options = lookups.found, lookups.options
    parts = [found[i] for i in numbers]
    is_free = len({(each.pack, each.pack.table_of(each.part)) for each in parts}) == len(parts)
    members: list[tuple[tuple[object, ...], list[int]]] = []
    of_kind: dict[tuple[object, ...], list[int]] = {}
    for i, each in zip(numbers, parts, strict=True):
        mode = options[i].mode
        kind = (each.pack, each.pack.run_of(each.part), mode, options[i].has_weights)
        group = of_kind.get(kind)
        if group is None or not (is_free or (members[-1][1] is group and mode != math.MAX)):
            group = of_kind[kind] = []
            members.append((kind, group))
        group.append(i)
    return [LookupGroup(lookups, group) for _, group in members]


class LookupGroup:
    """Lookups of one run of a pack and of one mode, all with weights or none; ids of one follow those of another.

    Args:
        lookups: of a call.
        numbers: those of the group.
        whole: the group of which these are some, whose ids the places of mode max count; None: it is this one.

    Attributes:
        numbers: as given.
        pack: the pack.
        mode: how bags are pooled; ROWS_OF_IDS: there are none.
    """

    def __init__(self, lookups: Lookups, numbers: Sequence[int], whole: LookupGroup | None = None) -> None:
        first = lookups.found[numbers[0]]
        self.numbers, self.pack = numbers, first.pack
        self._lookups, self._whole, self._run = lookups, whole, first.pack.run_of(first.part)
        self._parts = [lookups.found[i].part for i in numbers]
        self._options = [lookups.options[i] for i in numbers]
        self._ids = [lookups.ids[i] for i in numbers]
        self._sizes = [each.numel() for each in self._ids]
        self.mode = self._options[0].mode

    def outputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the output of each lookup, and the places in the group's ids that the largest values came from."""
        rows, dim = self._rows, self._options[0].dim
        if self.mode == ROWS_OF_IDS:
            made, places = math.gather(rows, self._positions), None
        else:
            made, places = math.pool(
                rows, self._positions, self._bags, mode=self.mode, weights=self._weights, paddings=self._paddings
            )
        parts = [made] if len(self.numbers) == 1 else made.split(self._counts)
        if self.mode == ROWS_OF_IDS:
            parts = [
                part if ids.dim() == 1 else part.view(*ids.shape, dim)
                for part, ids in zip(parts, self._ids, strict=True)
            ]
        return list(parts), [] if places is None else list(places.split(self._counts))

    def of(self, numbers: Sequence[int]) -> LookupGroup:
        """Returns the group of some of its lookups."""
        return self if len(numbers) == len(self.numbers) else LookupGroup(self._lookups, numbers, self)

    def gradient(self, grads: Sequence[Tensor], places: Sequence[Tensor]) -> PackGradient:
        """Returns what the gradients of all outputs add to the sums.

        Args:
            grads: of each output.
            places: of each lookup of mode max, as :meth:`outputs` returned them.
        """
        rows, dim = self._rows.shape[0], self._options[0].dim
        grad = _joined_rows(grads, dim)
        if self.mode == ROWS_OF_IDS:
            entries = math.entries_of_rows(grad, self._positions, rows=rows, paddings=self._paddings)
        elif self.mode == math.MAX:
            positions = (self._whole or self)._positions
            entries = math.entries_of_max(grad, positions, math.joined(list(places)), rows=rows)
        else:
            entries = math.entries_of_bags(
                grad,
                self._positions,
                self._bags,
                rows=rows,
                mode=self.mode,
                weights=self._weights,
                paddings=self._paddings,
            )
        parts = tuple((part, each.padding) for part, each in zip(self._parts, self._options, strict=True))
        is_max = self.mode == math.MAX
        has_all = self._paddings is None and (self.mode == ROWS_OF_IDS or (not is_max and self._bags.is_whole))
        return PackGradient(parts, entries, is_by_column=is_max, has_all=has_all)

    def gradients_of_weights(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns those of each lookup, (ids) float32, from the gradients of all outputs."""
        grad = _joined_rows(grads, self._options[0].dim)
        made = math.weights_gradient(grad, self._rows, self._positions, self._bags, paddings=self._paddings)
        return list(made.split(self._sizes))

    @property
    def _rows(self) -> Tensor:
        return self.pack.rows(self._run)

    @cached_property
    def _positions(self) -> Tensor:
        return self.pack.positions(self._parts)

    @cached_property
    def _weights(self) -> Tensor | None:
        if not self._options[0].has_weights:
            return None
        flat = [self._lookups.weights[i].reshape(-1).to(self._rows.device, torch.float32) for i in self.numbers]
        return math.joined(flat)

    @cached_property
    def _bags_of_ids(self) -> list[BagIds]:
        return [
            BagIds(ids, self._lookups.offsets[i] if each.has_offsets else None, bool(each.includes_last))
            for i, each, ids in zip(self.numbers, self._options, self._ids, strict=True)
        ]

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        """The number of the outputs' rows of each lookup: of its ids, or of its bags."""
        return tuple(self._sizes if self.mode == ROWS_OF_IDS else [each.count for each in self._bags_of_ids])

    @cached_property
    def _bags(self) -> Bags:
        return bags_of(self._bags_of_ids, self._rows.device, lambda: self.pack.layout(self._parts)[1])

    @cached_property
    def _paddings(self) -> Tensor | None:
        """The position of the padding id of each id, or of the ids of each bag, (n) int32; None: there is none."""
        wanted = [each.padding for each in self._options]
        if max(wanted) < 0:
            return None
        device = self._rows.device
        if all(self.pack.padding_of(part) == each for part, each in zip(self._parts, wanted, strict=True)):
            of_parts = self.pack.layout(self._parts)[2]
        else:  # the pack was made before a lookup of this padding id, or lookups of a table have several
            of_parts = _sent(
                torch.tensor(
                    [
                        -1 if each < 0 else self.pack.position_of(part, each)
                        for part, each in zip(self._parts, wanted, strict=True)
                    ],
                    dtype=torch.int32,
                ),
                device,
            )
        if self.mode != ROWS_OF_IDS:
            return of_parts.index_select(0, lookup_of(self._counts, device))
        return torch.repeat_interleave(of_parts, self.pack.layout(self._parts)[1], output_size=sum(self._sizes))


@dataclass(frozen=True)
class BagIds:
    """The ids of a pooled lookup.

    Args:
        ids: (bags, length), or (n) with offsets.
        offsets: where each bag begins, (bags) or (bags + 1); None: the ids have two dimensions.
        includes_last: whether the offsets end with the number of ids.

    Raises:
        ValueError: the shapes do not fit together, or offsets are no integers, or, on the host, out of order or without
            the number of ids at their end.
    """

    ids: Tensor
    offsets: Tensor | None
    includes_last: bool

    def __post_init__(self) -> None:
        ids, offsets = self.ids, self.offsets
        if ids.dim() != (2 if offsets is None else 1) or (offsets is not None and offsets.dim() != 1):
            given = "without offsets" if offsets is None else f"and offsets {offsets.dim()}-D"
            raise ValueError(
                f"InvalidArgument: gather_all: ids must be 2-D without offsets or 1-D with 1-D offsets; ids are "
                f"{ids.dim()}-D {given}"
            )
        if offsets is None:
            return
        if offsets.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"InvalidArgument: gather_bag.offsets.dtype: '{offsets.dtype}' is not allowed; allowed: int64, int32"
            )
        if offsets.is_cpu:
            self._check_offsets(offsets.to(torch.int64), ids.numel())

    def _check_offsets(self, offsets: Tensor, size: int) -> None:
        is_bad = torch.diff(offsets, prepend=offsets.new_zeros(1)) < 0
        is_bad |= offsets > size
        if len(offsets):
            is_bad[0] |= offsets[0] != 0
        if bool(is_bad.any()):
            at = int(torch.nonzero(is_bad)[0])
            raise ValueError(
                f"InvalidArgument: gather_bag.offsets[{at}]: {int(offsets[at])} is not allowed; allowed: 0 first, then "
                f"not falling, at most {size}"
            )
        if self.includes_last and (len(offsets) == 0 or int(offsets[-1]) != size):
            raise ValueError(
                f"InvalidArgument: gather_bag.offsets[{len(offsets) - 1}]: {offsets[-1:].tolist()} is not allowed; "
                f"allowed: {size}, the number of ids, as the last one with include_last_offset"
            )

    @property
    def count(self) -> int:
        """The number of bags."""
        return self.ids.shape[0] if self.offsets is None else max(self.offsets.shape[0] - self.includes_last, 0)


def bags_of(lookups: Sequence[BagIds], device: torch.device, sizes_there: Callable[[], Tensor]) -> Bags:
    """Returns the bags of pooled lookups, whose ids follow one another.

    Offsets that only the device has are not checked, but no bag reaches ids of another lookup.

    Args:
        lookups: at least one.
        device: of the result.
        sizes_there: returns the number of ids of each lookup, (lookups) integers on the device.
    """
    given = [each.offsets for each in lookups if each.offsets is not None]
    if not given:
        return fixed_bags(tuple((each.ids.shape[0], each.ids.shape[1]) for each in lookups), device)
    is_here = all(each.is_cpu for each in given)
    sizes = [each.ids.numel() for each in lookups]
    there = torch.tensor(sizes) if is_here else sizes_there().to(torch.int64)
    begins, ends = [], []
    for at, each in enumerate(lookups):
        if each.offsets is None:
            fixed = fixed_bags(((each.ids.shape[0], each.ids.shape[1]),), there.device)
            begins.append(fixed.begins)
            ends.append(fixed.ends)
            continue
        offsets = each.offsets.to(there.device)
        begins.append(offsets[: each.count])
        ends += [offsets[1:], there[at : at + 1]][: 1 if each.includes_last or each.count == 0 else 2]
    of_bag = lookup_of(tuple(each.count for each in lookups), there.device)
    limits = torch.cat([*begins, *ends]).to(torch.int64).view(2, -1).clamp(min=0)
    limits = torch.minimum(limits, there.index_select(0, of_bag))
    if len(lookups) > 1:
        limits = limits + (there.cumsum(0) - there).index_select(0, of_bag)
    limits = _sent(limits, device) if is_here else limits  # one copy brings those of all
    # Those on the host were checked: they begin at 0, and the last bag ends where the ids do.
    is_whole = is_here and all(each.count > 0 or size == 0 for each, size in zip(lookups, sizes, strict=True))
    return Bags(limits[0], limits[1], sum(sizes), is_whole=is_whole)


def _joined_rows(grads: Sequence[Tensor], dim: int) -> Tensor:
    """Returns gradients one behind the other, (n, dim) float32."""
    shape = grads[0].shape[1:]
    if all(each.shape[1:] == shape for each in grads):  # joined first, as each may lie in memory with gaps
        return math.joined([each if each.dtype is torch.float32 else each.float() for each in grads]).reshape(-1, dim)
    return math.joined([each.float().reshape(-1, dim) for each in grads])


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the host on the device, after one copy for which nobody waits."""
    link = link_of(device)
    host = link.host_buffer(tensor.nbytes)
    host.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return link.receive(link.send(host)).view(tensor.dtype).view(tensor.shape)
