"""Lookups of a model whose rows are on a device: rows cross in one copy, gradient sums come back in one copy.

``torch.ops.sparserow.gather_all`` and ``stage_all`` come here when the anchor is on a device; on the host they stay in
C++ (cpp_ext/ops). A *pack* holds the unique rows of the lookups and the position of each id among them; it is one run
of bytes. Gathering, pooling and sums by position run on the device (cpp_ext/device/lookup_math.py).

    prefetch or a forward hook offers packs -> gather_all finds its ids in them, or makes a pack of its own
    stage_all notes gradients -> flush() sums them by position, and stages what came back in the native session

Invariants:
 1. Between two ends of a step the gradients of all lookups cross once, in flush(), together with what was carried.
 2. A lookup whose ids no pack has costs a copy of its own and is right all the same.
 3. Ids on the device cost a copy to the host, unless they are views of a batch that was sent with its host's copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from . import _client
from .device import lookup_math as math
from .device.byte_layout import ByteLayout, view_of
from .device.link import DeviceLink, Sent, link_of

# Ids as the native half takes them: the address that the op sees, that of contiguous int64 on the host, sizes, strides,
# and bytes of an item.
Described: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...], int]

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


class Carried:
    """A device tensor whose values come to the host with the gradients of the step."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self._values: Tensor | None = None

    def put(self, values: Tensor) -> None:
        """Keeps the values, (n) float32 on the host."""
        self._values = values.reshape(self.tensor.shape)

    def values(self) -> Tensor:
        """The values on the host, float32, of the tensor's shape; call it after the end of the step."""
        if self._values is None:  # no gradient crossed in this step
            return self.tensor.float().cpu()
        return self._values


@dataclass
class _Gradient:
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
        self.gradients: list[_Gradient] = []

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
        _, n, dim, begin = self._groups[group]
        return view_of(buffer, begin, torch.float32, (n, dim))


@dataclass(frozen=True)
class _Found:
    pack: DevicePack
    part: int
    ids: Tensor  # kept, so that its memory names these ids as long as the step lasts


@dataclass
class _HostCopies:
    """A run of device memory whose tensors have copies on the host."""

    begin: int
    end: int
    tensors: list[tuple[int, Tensor]] = field(default_factory=list)  # (address on the device, the same on the host)


class StepOnDevice:
    """What one session's step has on a device.

    Packs are offered, and ``flush`` and ``forget`` called, by the thread that trains; backward may run in another one.

    Args:
        native: the session's native half.
    """

    def __init__(self, native: _client.NativeSession) -> None:
        self._native = native
        self._link: DeviceLink | None = None
        self._offered: list[DevicePack] = []
        self._packs: list[DevicePack] = []
        self._known: dict[tuple[object, ...], _Found] = {}
        self._copies: list[_HostCopies] = []
        self._carried: list[Carried] = []
        self._flags: list[Tensor] = []

    def link(self, device: torch.device) -> DeviceLink:
        """The link to the session's device, which the first lookup chooses.

        Raises:
            RuntimeError: lookups of this session were on another device before.
        """
        link = link_of(device)
        if self._link is None:
            self._link = link
        if link is not self._link:
            raise RuntimeError(
                f"FailedPrecondition: a lookup on {device}, but this session's lookups are on {self._link.device}; "
                "a session serves a model on one device"
            )
        return link

    @property
    def is_used(self) -> bool:
        """Whether a lookup of the session was on a device."""
        return self._link is not None

    def offer(self, pack: DevicePack) -> None:
        """Has lookups of this step look for their ids in the pack first."""
        self._offered.append(pack)

    def keep_host_copies(self, buffer: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], link: DeviceLink) -> None:
        """Remembers, for this step, that device tensors which are parts of ``buffer`` have copies on the host."""
        begin = link.address(buffer)
        copies = _HostCopies(begin, begin + buffer.numel())
        copies.tensors = [(link.address(there), host) for there, host in pairs]
        self._copies.append(copies)

    def host_of(self, tensor: Tensor, link: DeviceLink) -> Tensor:
        """The ids of a lookup on the host, int64 and contiguous: a copy that is known, or one that is made now."""
        if tensor.device.type != "cpu":
            tensor = self._known_copy(tensor, link)
        return tensor.to(torch.int64).contiguous()

    def _known_copy(self, tensor: Tensor, link: DeviceLink) -> Tensor:
        address = link.address(tensor)
        for copies in self._copies:
            if not copies.begin <= address < copies.end:
                continue
            for base, host in reversed(copies.tensors):
                offset, size = address - base, host.element_size()
                last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                fits = host.dtype == tensor.dtype and offset >= 0 and offset % size == 0 and tensor.numel() > 0
                if fits and offset // size + last <= host.numel():
                    return host.reshape(-1).as_strided(tensor.shape, tensor.stride(), offset // size)
        return link.wait(link.fetch(tensor.contiguous()))

    def find(
        self, tables: Sequence[str], ids: Sequence[Tensor], device: torch.device, *, train: bool, with_gradient: bool
    ) -> list[_Found]:
        """The packs that hold these lookups, in order; what none holds is looked up now and sent in one copy."""
        link = self.link(device)
        found: list[_Found | None] = [None] * len(ids)
        hosts = [self.host_of(each, link) for each in ids]
        named = [_describe(each, host, link) for each, host in zip(ids, hosts, strict=True)]
        for i, table in enumerate(tables):
            for pack in self._offered if train else ():
                part = pack.native.find(table, named[i])
                if part >= 0:
                    found[i] = _Found(pack, part, ids[i])
                    break
        lacking = [i for i, each in enumerate(found) if each is None]
        if lacking:
            pack = make_pack(
                link,
                [tables[i] for i in lacking],
                [named[i] for i in lacking],
                train=train,
                with_gradient=with_gradient,
            )
            for part, i in enumerate(lacking):
                found[i] = _Found(pack, part, ids[i])
        whole = [each for each in found if each is not None]
        if train and with_gradient:
            for table, each in zip(tables, whole, strict=True):
                self._known[_name_of(table, each.ids, link)] = each
                if each.pack not in self._packs:
                    self._packs.append(each.pack)
        return whole

    def recall(self, table: str, ids: Tensor, device: torch.device) -> _Found:
        """The lookup of this step that was given these ids.

        Raises:
            RuntimeError: there is none, as the step is over.
        """
        found = self._known.get(_name_of(table, ids, self.link(device)))
        if found is None:
            raise RuntimeError(
                f"FailedPrecondition: table {table!r}: gradient for ids that were not looked up in this step: call "
                "backward before session.step"
            )
        return found

    def note_gradient(self, found: _Found, gradient: _Gradient) -> None:
        """Keeps what a backward has brought until the step ends."""
        found.pack.gradients.append(gradient)
        self._native.count_staged()

    def carry(self, tensor: Tensor) -> Carried:
        """Has the values of a device tensor come to the host with the step's gradients."""
        carried = Carried(tensor)
        self._carried.append(carried)
        return carried

    def flush(self) -> None:
        """Sums the gradients on the device, brings them and what is carried to the host in one copy, and stages them.

        Raises:
            SparserowError: the session can no longer be used.
        """
        packs = [pack for pack in self._packs if pack.gradients]
        carried, self._carried = self._carried, []
        if self._link is None or not (packs or carried):
            return
        floats = sum(each.tensor.numel() for each in carried)
        total = floats + sum(pack.native.floats_of_sums for pack in packs)
        sums = torch.empty(total, device=self._link.device)
        at = 0
        for each in carried:
            sums[at : at + each.tensor.numel()].copy_(each.tensor.reshape(-1))
            at += each.tensor.numel()
        for pack in packs:
            at = _sum_pack(pack, sums, at)
        host = self._link.wait(self._link.fetch(sums))
        at = 0
        for each in carried:
            each.put(host[at : at + each.tensor.numel()])
            at += each.tensor.numel()
        for pack in packs:
            staged = [(each.part, each.padding_idx) for each in pack.gradients]
            pack.gradients = []
            pack.native.stage(staged, host[at:].data_ptr())
            at += pack.native.floats_of_sums

    def drop_gradients(self) -> None:
        """Forgets the gradients that backward has brought; rows stay."""
        for pack in self._packs:
            pack.gradients = []
        self._carried = []

    def forget(self) -> None:
        """Ends the step: its packs are forgotten, and their memory is free once nothing reads it."""
        self.drop_gradients()
        self._offered, self._packs, self._known, self._copies = [], [], {}, []


def make_pack(
    link: DeviceLink, tables: Sequence[str], ids: Sequence[Described], *, train: bool, with_gradient: bool
) -> DevicePack:
    """Looks ids up in one pull and sends their rows in one copy.

    Args:
        link: to the device.
        tables: the binding of each lookup.
        ids: of each; what is described must live until the call returns.
        train: by the step's clock, remembered until the step ends; else the newest rows.
        with_gradient: whether a backward follows.
    """
    native = _client.LookupPack(list(zip(tables, ids, strict=True)), train=train, with_gradient=with_gradient)
    host = link.host_buffer(native.bytes)
    native.write(host.data_ptr())
    return DevicePack(native, link, link.send(host))


def _sum_pack(pack: DevicePack, sums: Tensor, at: int) -> int:
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


def _describe(tensor: Tensor, host: Tensor, link: DeviceLink) -> Described:
    """The ids of a lookup as the native half takes them; ``host`` has them as contiguous int64."""
    return (
        link.address(tensor), host.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size()
    )  # fmt: skip


def _name_of(table: str, ids: Tensor, link: DeviceLink) -> tuple[object, ...]:
    version = 0 if ids.is_inference() else ids._version
    return (table, link.address(ids), tuple(ids.shape), ids.stride(), ids.dtype, version)


_steps: weakref.WeakValueDictionary[str, StepOnDevice] = weakref.WeakValueDictionary()


def register(table: str, step: StepOnDevice) -> None:
    """Says which session's step the lookups of a binding belong to; the entry ends with the session."""
    _steps[table] = step


def _step_of(table: str) -> StepOnDevice:
    """The step of the session that has bound the table; a lookup of a served program has one of its own."""
    step = _steps.get(table)
    return _Unbound() if step is None else step


class _Unbound(StepOnDevice):
    """The step of lookups that no session of this module's users has bound: they never train."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]


def _options_of(options: Sequence[int], n: int) -> list[_Options]:
    return [_Options(*options[i * _OPTIONS : (i + 1) * _OPTIONS]) for i in range(n)]


def _bags_of(options: _Options, ids: Tensor, offsets: Tensor, device: torch.device) -> math.Bags:
    """The bags of a pooled lookup, on the device.

    Raises:
        ValueError: the shapes do not fit together, or offsets on the host are out of order.
    """
    if not options.has_offsets:
        if ids.dim() != 2:
            raise ValueError(
                f"InvalidArgument: gather_all: ids must be 2-D without offsets or 1-D with 1-D offsets; ids are "
                f"{ids.dim()}-D without offsets"
            )
        return math.uniform_bags(ids.shape[0], ids.shape[1], device)
    n = ids.numel()
    if offsets.device.type == "cpu":
        _check_offsets(offsets, n)
    begins = offsets.to(device, torch.int64)
    if not options.includes_last:
        begins = torch.cat([begins, torch.full((1,), n, dtype=torch.int64, device=device)])
    return math.Bags(begins, n)


def _check_offsets(offsets: Tensor, n: int) -> None:
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
    step = _step_of(names[0])
    found = step.find(names, ids, device, train=train, with_gradient=anchor.numel() > 0)
    out, places = [], []
    for i, (each, lookup) in enumerate(zip(found, _options_of(options, len(ids)), strict=True)):
        rows, positions = each.pack.rows(each.pack.group_of(each.part)), each.pack.positions(each.part)
        if lookup.mode == _ROWS_OF_IDS:
            out.append(math.gather(rows, positions).view(*ids[i].shape, lookup.dim))
            continue
        pooled, place = math.pool(
            rows,
            positions,
            _bags_of(lookup, ids[i], offsets[i], device),
            mode=lookup.mode,
            weights=weights[i].reshape(-1).to(device, torch.float32) if lookup.has_weights else None,
            padding=_padding_position(each, lookup),
        )
        out.append(pooled)
        if place is not None:
            places.append(place)
    return out + places


def _padding_position(found: _Found, lookup: _Options) -> int:
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
    step, lookups = _step_of(names[0]), _options_of(options, len(ids))
    out, left = [torch.zeros(1, device=device)], list(places)
    for i, lookup in enumerate(lookups):
        place = left.pop(0) if lookup.mode == math.MAX else None
        if grads[i].numel() == 0:
            if wants[i]:
                out.append(torch.zeros_like(weights[i]))
            continue
        found = step.recall(names[i], ids[i], device)
        group, padding = found.pack.group_of(found.part), _padding_position(found, lookup)
        rows, positions, grad = found.pack.size(group), found.pack.positions(found.part), grads[i].float()
        if lookup.mode == _ROWS_OF_IDS:
            grad = grad.reshape(-1, lookup.dim)
            entries = math.entries_of_rows(grad.contiguous(), positions, rows=rows, padding=padding)
        elif place is not None:
            entries = math.entries_of_max(grad.contiguous(), positions, place, rows=rows)
        else:
            bags = _bags_of(lookup, ids[i], offsets[i], device)
            flat = weights[i].reshape(-1).to(device, torch.float32) if lookup.has_weights else None
            entries = math.entries_of_bags(
                grad.contiguous(), positions, bags, rows=rows, mode=lookup.mode, weights=flat, padding=padding
            )
            if wants[i]:
                made = math.weights_gradient(grad, found.pack.rows(group), positions, bags, padding=padding)
                out.append(made.view(weights[i].shape).to(weights[i]))
        gradient = _Gradient(found.part, group, lookup.padding, entries, is_by_column=place is not None)
        step.note_gradient(found, gradient)
    return out


class BatchOnDevice:
    """Tensors of a batch, and the pack of its lookups, on their way to a device in one copy.

    Args:
        link: to the device.
        native: the pack of the batch's lookups; None: it has none.
        tensors: of the batch, on the host.
    """

    def __init__(self, link: DeviceLink, native: _client.LookupPack | None, tensors: Sequence[Tensor]) -> None:
        self._layout, self._link, self._tensors = ByteLayout(), link, list(tensors)
        if native is not None:
            self._layout.reserve(native.bytes)
        for tensor in self._tensors:
            self._layout.add(tensor)
        host = link.host_buffer(self._layout.size)
        if native is not None and native.bytes:
            native.write(host.data_ptr())
        self._layout.write(self._tensors, host)
        self._sent = link.send(host)
        self.pack = None if native is None else DevicePack(native, link, self._sent, self)

    def receive(self, step: StepOnDevice) -> list[Tensor]:
        """The tensors on the device, in order; the step knows their copies on the host from now on."""
        buffer = self._link.receive(self._sent) if self.pack is None else self.pack.buffer()
        there = self._layout.views(buffer)
        integers = [
            (view, tensor)
            for view, tensor in zip(there, self._tensors, strict=True)
            if tensor.dtype in (torch.int64, torch.int32) and tensor.numel() > 0
        ]
        step.keep_host_copies(buffer, [(view, host.contiguous()) for view, host in integers], self._link)
        return there
