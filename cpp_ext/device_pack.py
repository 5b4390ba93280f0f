"""Packs: the unique rows of several lookups, and the position of each id among them, in one copy to a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

from . import _client
from .device import lookup_math as math
from .device.byte_layout import ByteLayout, view_of
from .device.link import DeviceLink, Sent

if TYPE_CHECKING:
    from .device_step import StepOnDevice

# Ids as the native half takes them: the address that the op sees, that of contiguous int64 on the host, sizes, strides,
# and bytes of an item.
Described: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...], int]


def described(ids: Tensor) -> Described:
    """Ids on the host, contiguous int64, as the native half takes them; they must outlive its call."""
    return ids.data_ptr(), ids.data_ptr(), tuple(ids.shape), ids.stride(), ids.element_size()


class RowsOfLookups(Protocol):
    """Rows of several lookups on a device, and the position of each id among them."""

    def run_of(self, part: int) -> int:
        """The run whose rows a part reads: its tables have one width."""
        ...

    def table_of(self, part: int) -> int:
        """A number that parts of one table share, where their gradients are added to the same sums."""
        ...

    def padding_of(self, part: int) -> int:
        """The id whose position :meth:`layout` has for a part; negative: none."""
        ...

    def position_of(self, part: int, padding: int) -> int:
        """The position of an id that a part leaves out; -1 where no id is that."""
        ...

    def rows(self, run: int) -> Tensor:
        """(n, dim) float32 on the device."""
        ...

    def positions(self, parts: Sequence[int]) -> Tensor:
        """(n) int32 on the device: the row of each id of some lookups of a run, in the rows of the run."""
        ...

    def layout(self, parts: Sequence[int]) -> Tensor:
        """(3, parts) int32 on the device: the first id of each part among those of its run, its number of ids, and the
        position of the id :meth:`padding_of`, -1 where it is not there.
        """
        ...


class FoundPart(Protocol):
    """The part of such rows that one lookup reads."""

    @property
    def pack(self) -> RowsOfLookups:
        """The rows."""
        ...

    @property
    def part(self) -> int:
        """The part."""
        ...


@dataclass
class PackGradient:
    """What lookups of one run add to its sums.

    Attributes:
        parts: of the pack, in the order of their entries, each with the id that adds nothing; negative: none.
        entries: of the parts' run.
        is_by_column: whether an entry is a column of a row.
        has_all: whether each id of the parts has its entry, in order.
    """

    parts: tuple[tuple[int, int], ...]
    entries: math.Entries
    is_by_column: bool
    has_all: bool = False


class DevicePack:
    """Rows of several lookups on a device; tables of one width make a run, and are served together.

    Args:
        native: the pack of the native session; it was written to the bytes that were sent.
        link: to the device.
        sent: the pack's bytes, from the first on; other tensors may follow them.
        keeps: what must live as long as the pack.

    Attributes:
        runs: (unique rows, dim, first byte) of each run.
        gradients: what backward has brought.
    """

    def __init__(self, native: _client.LookupPack, link: DeviceLink, sent: Sent, keeps: object = None) -> None:
        self.native = native
        self._link, self._sent, self._keeps = link, sent, keeps
        self.runs, self._groups, self._parts = native.runs, native.groups, native.parts
        self._paddings, self._orders = native.paddings, native.orders
        self._buffer: Tensor | None = None
        self._fresh: Sent | None = None
        self._rows: dict[int, Tensor] = {}
        self._layout: Tensor | None = None
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
                for run, places_at, rows_at, n in self.native.fresh[0]:
                    places = view_of(fresh, places_at, torch.int32, (n,))
                    values = view_of(fresh, rows_at, torch.float32, (n, self.runs[run][1]))
                    self.rows(run).index_copy_(0, places.to(torch.int64), values)
        return self._buffer

    def run_of(self, part: int) -> int:
        """See :class:`RowsOfLookups`."""
        return self._groups[self._parts[part][0]][0]

    def table_of(self, part: int) -> int:
        """The number, in the pack, of the table that a part reads."""
        table: int = self._parts[part][0]
        return table

    def padding_of(self, part: int) -> int:
        """See :class:`RowsOfLookups`."""
        return self._paddings[self._parts[part][0]]

    def position_of(self, part: int, padding: int) -> int:
        """See :class:`RowsOfLookups`."""
        return self.native.position_of(part, padding)

    def rows(self, run: int) -> Tensor:
        """(unique rows, dim) float32 on the device."""
        if run not in self._rows:
            n, dim, begin = self.runs[run]
            self._rows[run] = view_of(self.buffer(), begin, torch.float32, (n, dim))
        return self._rows[run]

    def positions(self, parts: Sequence[int]) -> Tensor:
        """See :class:`RowsOfLookups`."""
        begin, total, lie_together = self._parts[parts[0]][2], 0, True
        for part in parts:
            _, n, at = self._parts[part]
            lie_together = lie_together and at == begin + total * torch.int32.itemsize
            total += n
        if lie_together:  # as those of all parts of a run do
            return view_of(self.buffer(), begin, torch.int32, (total,))
        return torch.cat([self.positions([part]) for part in parts])

    def order(self, run: int, parts: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """What :func:`lookup_math.sum_entries` takes for the ids of some parts of a run, one behind the other.

        None where the pack has no order, or these are not all parts of the run, in order.
        """
        n, begins_at, ids_at = self._orders[run]
        if not begins_at or list(parts) != [part for part in range(len(self._parts)) if self.run_of(part) == run]:
            return None
        return (
            view_of(self.buffer(), begins_at, torch.int32, (self.runs[run][0] + 1,)),
            view_of(self.buffer(), ids_at, torch.int32, (n,)),
        )

    def layout(self, parts: Sequence[int]) -> Tensor:
        """See :class:`RowsOfLookups`."""
        if self._layout is None:
            self._layout = view_of(self.buffer(), self.native.layout_begin, torch.int32, (3, len(self._parts)))
        first = parts[0]
        if parts[-1] - first + 1 == len(parts) and all(part == first + at for at, part in enumerate(parts)):
            return self._layout[:, first : first + len(parts)]
        return torch.stack([self._layout[:, part] for part in parts], dim=1)


def make_pack(
    link: DeviceLink,
    lookups: Sequence[tuple[str, Described]],
    paddings: Mapping[str, int],
    *,
    train: bool,
    with_gradient: bool,
) -> DevicePack:
    """Looks ids up in one pull and sends their rows in one copy.

    Args:
        link: to the device.
        lookups: the binding and the ids of each; what is described must live until the call returns.
        paddings: the id that lookups of a table leave out, by the table's binding.
        train: by the step's clock, remembered until the step ends; else the newest rows.
        with_gradient: whether a backward follows.
    """
    native = _client.LookupPack(list(lookups), train=train, with_gradient=with_gradient)
    return send_pack(link, native, paddings, trains=train and with_gradient)


def send_pack(link: DeviceLink, native: _client.LookupPack, paddings: Mapping[str, int], *, trains: bool) -> DevicePack:
    """Sends the rows and positions of a pack in one copy."""
    _prepare(native, paddings, link, trains=trains)
    host = link.host_buffer(native.bytes)
    native.write(host.data_ptr())
    return DevicePack(native, link, link.send(host))


def _prepare(native: _client.LookupPack, paddings: Mapping[str, int], link: DeviceLink, *, trains: bool) -> None:
    """Has a pack say what its lookups need on the device.

    Args:
        native: the pack, before its bytes are counted.
        paddings: the id that lookups of a table leave out, by the table's binding.
        link: to the device.
        trains: whether a backward may follow, whose kernel goes through the ids of each row.
    """
    if paddings:
        native.set_paddings([paddings.get(table, -1) for table in native.tables])
    if trains and math.runs_kernels(link.device):
        native.order_ids()


def sum_pack(pack: DevicePack, sums: Tensor, at: int) -> int:
    """Writes the sums of a pack's runs to ``sums`` from ``at`` on; where they end."""
    for run, (size, dim, _) in enumerate(pack.runs):
        out = sums[at : at + size * dim].view(size, dim)
        mine = [each for each in pack.gradients if pack.run_of(each.parts[0][0]) == run]
        plain = [each for each in mine if not each.is_by_column]
        if plain:
            is_whole = len(plain) == 1 and plain[0].has_all
            order = pack.order(run, [part for part, _ in plain[0].parts]) if is_whole else None
            math.sum_entries([each.entries for each in plain], size, out, order)
        else:
            out.zero_()
        for each in mine:
            if each.is_by_column:
                columns = torch.empty(size * dim, 1, device=sums.device)
                math.sum_entries([each.entries], size * dim, columns)
                out.add_(columns.view(size, dim))
        at += size * dim
    return at


class BatchOnDevice:
    """Tensors of a batch, and the pack of its lookups, on their way to a device in one copy.

    Args:
        link: to the device.
        step: what the session's step has there.
        native: the pack of the batch's lookups; None: it has none.
        tensors: of the batch, on the host.
    """

    def __init__(
        self, link: DeviceLink, step: StepOnDevice, native: _client.LookupPack | None, tensors: Sequence[Tensor]
    ) -> None:
        self._layout, self._link, self._step, self._tensors = ByteLayout(), link, step, list(tensors)
        if native is not None:
            _prepare(native, step.paddings, link, trains=True)
            self._layout.reserve(native.bytes)
        for tensor in self._tensors:
            self._layout.add(tensor)
        host = link.host_buffer(self._layout.size)
        if native is not None and native.bytes:
            native.write(host.data_ptr())
        self._layout.write(self._tensors, host)
        self._sent = link.send(host)
        self.pack = None if native is None else DevicePack(native, link, self._sent, self)

    def receive(self) -> list[Tensor]:
        """The tensors on the device, in order; the step knows the host's copies of integer ones from now on."""
        buffer = self._link.receive(self._sent) if self.pack is None else self.pack.buffer()
        with torch.inference_mode(False):  # so that torch counts what changes a tensor in place, for each of them alone
            there = [view.data for view in self._layout.views(buffer)]
        for view, tensor in zip(there, self._tensors, strict=True):
            if tensor.dtype in (torch.int64, torch.int32) and tensor.numel() > 0:
                self._step.keep_host_copy(view, tensor.contiguous())
        return there
