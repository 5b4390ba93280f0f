"""Packs: the unique rows of several lookups, and the position of each id among them, in one copy to a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from . import _client
from .device import lookup_math as math
from .device.byte_layout import ByteLayout, view_of
from .device.link import DeviceLink, Prepare, Sent
from .device.row_store import DTYPES, RowPlan, RowStores

if TYPE_CHECKING:
    from .device_step import StepOnDevice

# Ids as the native half takes them: the address that the op sees, that of contiguous int64 on the host, sizes, strides,
# and bytes of an item.
Described: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...], int]


@dataclass
class PackGradient:
    """What one lookup adds to the sums of its group."""

    part: int
    group: int
    padding_idx: int
    entries: math.Entries
    is_by_column: bool


class DevicePack:
    """Rows of several lookups on a device.

    Args:
        native: the pack of the native session; it was written to the bytes that were sent.
        link: to the device.
        sent: the pack's bytes, from the first on; other tensors may follow them.
        keeps: what must live as long as the pack.
    """

    def __init__(self, native: _client.LookupPack, link: DeviceLink, sent: Sent, keeps: object = None) -> None:
        self.native = native
        self._link, self._sent, self._keeps = link, sent, keeps
        self._groups, self._parts = native.groups, native.parts
        self._buffer: Tensor | None = None
        self._fresh: Sent | None = None
        self.gradients: list[PackGradient] = []

    def send_fresh(self) -> None:
        """Sends the rows that were pulled or refreshed after the pack was sent, in one copy; none costs nothing."""
        _, size = self.native.fresh
        if size:
            host = self._link.host_buffer(size)
            self.native.write_fresh(host.data_ptr())
            self._fresh = self._link.send(host)

    def buffer(self) -> Tensor:
        """(n) uint8 on the device, with every row as the step sees it."""
        if self._buffer is None:
            self._buffer = self._link.receive(self._sent)
            if self._fresh is not None:
                fresh = self._link.receive(self._fresh)
                for group, places_at, rows_at, n in self.native.fresh[0]:
                    places = view_of(fresh, places_at, torch.int32, (n,))
                    values = view_of(fresh, rows_at, torch.float32, (n, self.dim(group)))
                    self._rows(group, self._buffer).index_copy_(0, places.to(torch.int64), values)
        return self._buffer

    def dim(self, group: int) -> int:
        """Columns of a group's rows."""
        return self._groups[group][2]

    def size(self, group: int) -> int:
        """Unique rows of a group."""
        return self._groups[group][1]

    def group_of(self, part: int) -> int:
        """The group whose rows a part reads."""
        return self._parts[part][0]

    def rows(self, group: int) -> Tensor:
        """(unique rows, dim) float32 on the device."""
        return self._rows(group, self.buffer())

    def positions(self, part: int) -> Tensor:
        """(n) int32 on the device: the row of each id of a lookup."""
        _, n, begin = self._parts[part]
        return view_of(self.buffer(), begin, torch.int32, (n,))

    def _rows(self, group: int, buffer: Tensor) -> Tensor:
        if self._sent.made:  # the rows came together on the way
            return self._sent.made[group]
        _, n, dim, begin = self._groups[group]
        return view_of(buffer, begin, torch.float32, (n, dim))


def make_pack(
    link: DeviceLink,
    stores: RowStores,
    tables: Sequence[str],
    ids: Sequence[Described],
    *,
    train: bool,
    with_gradient: bool,
) -> DevicePack:
    """Looks ids up in one pull and sends their rows in one copy.

    Args:
        link: to the device.
        stores: of the rows that the device keeps.
        tables: the binding of each lookup.
        ids: of each; what is described must live until the call returns.
        train: by the step's clock, remembered until the step ends; else the newest rows.
        with_gradient: whether a backward follows.
    """
    native = _client.LookupPack(list(zip(tables, ids, strict=True)), train=train, with_gradient=with_gradient)
    return send_pack(link, stores, native)


def send_pack(link: DeviceLink, stores: RowStores, native: _client.LookupPack) -> DevicePack:
    """Sends the rows and positions of a pack in one copy; rows that the device has kept stay out of it."""
    with stores.order:
        native.plan()
        host = link.host_buffer(native.bytes)
        native.write(host.data_ptr())
        return DevicePack(native, link, link.send(host, rows_by_plan(native, stores)))


def rows_by_plan(native: _client.LookupPack, stores: RowStores) -> Prepare:
    """What brings the rows of a planned pack together on the device; nothing for a pack without a plan."""
    plans = [
        None if plan is None else (RowPlan(n, dim, begin, *plan[:3], DTYPES[plan[3]]), plan[4])
        for plan, (_, n, dim, begin) in zip(native.plans, native.groups, strict=True)
    ]

    def prepare(pack: Tensor) -> tuple[Tensor, ...]:
        made = []
        for planned in plans:
            if planned is not None:
                plan, generation = planned
                made.append(plan.rows(pack, stores.store(plan, generation, pack.device)))
        return tuple(made)

    return prepare


def sum_pack(pack: DevicePack, sums: Tensor, at: int) -> int:
    """Writes the sums of a pack's groups to ``sums`` from ``at`` on; where they end."""
    for group in range(len(pack.native.groups)):
        size, dim = pack.size(group), pack.dim(group)
        out = sums[at : at + size * dim]
        mine = [each for each in pack.gradients if each.group == group]
        plain = [each.entries for each in mine if not each.is_by_column]
        by_column = [each.entries for each in mine if each.is_by_column]
        if plain:
            math.sum_entries(plain, size, out.view(size, dim))
        if by_column:
            columns = torch.empty(size * dim, 1, device=sums.device)
            math.sum_entries(by_column, size * dim, columns)
            if plain:
                out.add_(columns.view(-1))
            else:
                out.copy_(columns.view(-1))
        at += size * dim
    return at


class BatchOnDevice:
    """Tensors of a batch, and the pack of its lookups, on their way to a device in one copy.

    Args:
        link: to the device.
        stores: of the rows that the device keeps.
        native: the pack of the batch's lookups; None: it has none.
        tensors: of the batch, on the host.
    """

    def __init__(
        self, link: DeviceLink, stores: RowStores, native: _client.LookupPack | None, tensors: Sequence[Tensor]
    ) -> None:
        self._layout, self._link, self._tensors = ByteLayout(), link, list(tensors)
        with stores.order:
            if native is not None:
                native.plan()
                self._layout.reserve(native.bytes)
            for tensor in self._tensors:
                self._layout.add(tensor)
            host = link.host_buffer(self._layout.size)
            if native is not None and native.bytes:
                native.write(host.data_ptr())
            self._layout.write(self._tensors, host)
            self._sent = link.send(host) if native is None else link.send(host, rows_by_plan(native, stores))
        self.pack = None if native is None else DevicePack(native, link, self._sent, self)

    def receive(self, step: StepOnDevice) -> list[Tensor]:
        """The tensors on the device, in order; the step knows the host's copies of integer ones from now on."""
        buffer = self._link.receive(self._sent) if self.pack is None else self.pack.buffer()
        there = self._layout.views(buffer)
        for view, tensor in zip(there, self._tensors, strict=True):
            if tensor.dtype in (torch.int64, torch.int32) and tensor.numel() > 0:
                step.keep_host_copy(view, tensor.contiguous())
        return there
