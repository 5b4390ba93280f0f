"""What the step of one session has on a device: packs of rows, gradients that wait for the end of the step.

    prefetch or a forward hook offers packs -> gather_all finds its ids in them, or makes a pack of its own
    stage_all notes gradients -> flush() sums them by position, and stages what came back in the native session

Invariants:
 1. Between two ends of a step the gradients of all lookups cross once, in flush(), together with what was carried.
 2. A lookup whose ids no pack has costs a copy of its own and is right all the same.
 3. Ids on the device cost a copy to the host, unless they are views of a batch that was sent with its host's copy, and
    nothing has changed them in place since.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _client
from .device.link import DeviceLink, link_of
from .device_cache import DeviceCache
from .device_pack import Described, DevicePack, PackGradient, make_pack, send_pack, sum_pack


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


@dataclass(frozen=True)
class FoundLookup:
    """The part of a pack that has the ids of a lookup."""

    pack: DevicePack
    part: int


@dataclass(frozen=True)
class _KnownLookups:
    """What a call has looked up, with all that its backward needs."""

    made: Any
    ids: Sequence[Tensor]  # kept, so that their memory names them as long as the step lasts


@dataclass(frozen=True)
class _HostCopy:
    """A run of device memory whose values are on the host as well; it is kept, so that no other tensor gets it."""

    begin: int
    end: int
    host: Tensor
    there: Tensor
    version: int  # of ``there`` and of every view of it: an operation in place raises it

    @property
    def is_current(self) -> bool:
        """Whether nothing has changed the values on the device since they were copied."""
        return self.there._version == self.version


class StepOnDevice:
    """What one session's step has on a device.

    Packs are offered, and ``flush`` and ``forget`` called, by the thread that trains; backward may run in another one.

    Args:
        native: the session's native half.

    Attributes:
        cache: of rows for lookups that do not train; None: they are pulled.
        paddings: the id that the last lookup of a table has left out, by the table's binding.
        steps_undone: by how many steps the session is ahead of its rows, since a restore set them back.
    """

    def __init__(self, native: _client.NativeSession) -> None:
        self._native = native
        self.cache: DeviceCache | None = None
        self.steps_undone = 0
        self.paddings: dict[str, int] = {}
        self._link: DeviceLink | None = None
        self._of_step: list[DevicePack] = []  # that were offered to it
        self._is_prefetched = False
        self._packs: list[DevicePack] = []
        self._known: dict[tuple[object, ...], _KnownLookups] = {}
        self._of_thread = threading.local()  # the host's copies that this thread has, so that calls may overlap
        self._carried: list[Carried] = []
        self._sums: Tensor | None = None  # of the last flush; the step's commit reads them where they lie

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

    def _offered(self, train: bool) -> list[DevicePack]:
        """The packs that were offered to the step, or else to this thread's forward of an evaluation."""
        if train:
            return self._of_step
        if not hasattr(self._of_thread, "offered"):
            self._of_thread.offered = []
        offered: list[DevicePack] = self._of_thread.offered
        return offered

    @property
    def _copies(self) -> list[_HostCopy]:
        if not hasattr(self._of_thread, "copies"):
            self._of_thread.copies = []
        copies: list[_HostCopy] = self._of_thread.copies
        return copies

    @property
    def is_used(self) -> bool:
        """Whether a lookup of the session was on a device."""
        return self._link is not None

    @property
    def is_prefetched(self) -> bool:
        """Whether a prefetched batch has offered a pack to this step."""
        return self._is_prefetched

    def offer(self, pack: DevicePack, *, train: bool = True) -> None:
        """Has lookups of this step, or of this thread's forward of an evaluation, look for their ids in the pack of a
        batch first.
        """
        self._offered(train).append(pack)
        self._is_prefetched = self._is_prefetched or train

    def send_and_offer(self, native: _client.LookupPack, *, train: bool) -> None:
        """Sends a forward's pack in one copy, and has the forward's lookups look for their ids there first.

        Args:
            native: the pack; an empty one is left.
            train: whether the lookups belong to this step, or else to an evaluation.
        """
        if native.bytes and self._link is not None:
            self._offered(train).append(send_pack(self._link, native, self.paddings, trains=train))

    def end_evaluation(self) -> None:
        """Forgets the packs that were offered to this thread's forward of an evaluation, and its copies on the host."""
        self._offered(train=False).clear()
        self._copies.clear()

    def keep_host_copy(self, there: Tensor, host: Tensor) -> None:
        """Remembers, for this thread and until the step or the evaluation's forward ends, a device tensor's copy on
        the host. That of an inference tensor is not kept, because torch does not count what changes it in place.

        Args:
            there: the tensor on the device.
            host: the same values on the host, with the same strides.
        """
        if there.is_inference():
            return
        begin = self.link(there.device).address(there)
        end = begin + _extent(there) * there.element_size()
        self._copies.append(_HostCopy(begin, end, host, there, there._version))

    def host_of(self, tensor: Tensor, link: DeviceLink) -> Tensor:
        """The ids of a lookup on the host, int64 and contiguous: a copy that is known, or one that is made now.

        Raises:
            ValueError: they are neither int64 nor int32.
        """
        if tensor.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"InvalidArgument: ids.dtype: '{tensor.dtype}' is not allowed; allowed: int64, int32")
        if not tensor.is_cpu:
            tensor = self._known_copy(tensor, link)
        return tensor if tensor.dtype is torch.int64 and tensor.is_contiguous() else tensor.long().contiguous()

    def _known_copy(self, tensor: Tensor, link: DeviceLink) -> Tensor:
        """The values of a device tensor on the host: from a copy that is known, or else from a new one."""
        address, size = link.address(tensor), tensor.element_size()
        for copy in self._copies:
            begin, end = copy.begin, copy.end
            fits = begin <= address and address + _extent(tensor) * size <= end and (address - begin) % size == 0
            if fits and copy.host.dtype == tensor.dtype and tensor.numel() > 0 and copy.is_current:
                first = copy.host.storage_offset() + (address - begin) // size
                return copy.host.as_strided(tensor.shape, tensor.stride(), first)
        # The columns of one computed tensor are fetched together.
        base = tensor._base
        whole = base if base is not None and base.is_contiguous() and base.dtype == tensor.dtype else tensor
        host = link.wait(link.fetch(whole.contiguous()))
        if not whole.is_contiguous() or whole.is_inference():
            return host
        self.keep_host_copy(whole, host)
        return host if whole is tensor else self._known_copy(tensor, link)

    def copy_on_host(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor on the host, with its strides; None where a copy of it has others."""
        host = tensor if tensor.device.type == "cpu" else self._known_copy(tensor, self.link(tensor.device))
        return host if host.stride() == tensor.stride() else None

    def find(
        self, tables: Sequence[str], ids: Sequence[Tensor], device: torch.device, *, train: bool, with_gradient: bool
    ) -> list[FoundLookup]:
        """The packs that hold these lookups, in order; what none holds is looked up now and sent in one copy."""
        link = self.link(device)
        hosts = [self.host_of(each, link) for each in ids]
        lacking = [(table, _describe(each, host, link)) for table, each, host in zip(tables, ids, hosts, strict=True)]
        found: list[FoundLookup | None] = [None] * len(ids)
        places = list(range(len(ids)))  # of those that are lacking
        for pack in self._offered(train):
            parts = pack.native.find(lacking)
            for place, part in zip(places, parts, strict=True):
                found[place] = FoundLookup(pack, part) if part >= 0 else None
            lacking = [each for each, part in zip(lacking, parts, strict=True) if part < 0]
            places = [each for each, part in zip(places, parts, strict=True) if part < 0]
            if not lacking:
                break
        if lacking:
            pack = make_pack(link, lacking, self.paddings, train=train, with_gradient=with_gradient)
            for part, place in enumerate(places):
                found[place] = FoundLookup(pack, part)
        whole = [each for each in found if each is not None]
        if train and with_gradient:
            for each in whole:
                if each.pack not in self._packs:
                    self._packs.append(each.pack)
        return whole

    def remember(self, tables: str, ids: Sequence[Tensor], device: torch.device, made: Any) -> None:
        """Keeps, until the step ends, what a backward needs of the lookups of a call."""
        self._known[_name_of(tables, ids, self.link(device))] = _KnownLookups(made, ids)

    def recall(self, tables: str, ids: Sequence[Tensor], device: torch.device) -> Any:
        """What :meth:`remember` has kept of the lookups of these ids in this step.

        Raises:
            RuntimeError: there are none, as the step is over.
        """
        known = self._known.get(_name_of(tables, ids, self.link(device)))
        if known is None:
            raise RuntimeError(
                f"FailedPrecondition: table {tables.partition(chr(10))[0]!r}: gradient for ids that were not looked up "
                "in this step: call backward before session.step"
            )
        return known.made

    def note_gradient(self, pack: DevicePack, gradient: PackGradient) -> None:
        """Keeps what a backward has brought until the step ends."""
        pack.gradients.append(gradient)
        for _ in gradient.parts:
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
            at = sum_pack(pack, sums, at)
        # The commit of the last step has ended, even one that went on behind; see Session.flush.
        self._sums = host = self._link.wait(self._link.fetch(sums))
        at = 0
        for each in carried:
            each.put(host[at : at + each.tensor.numel()])
            at += each.tensor.numel()
        for pack in packs:
            staged = [part for each in pack.gradients for part in each.parts]
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
        self._of_step = []
        self._is_prefetched = False
        self._packs, self._known = [], {}
        self._copies.clear()


def _extent(tensor: Tensor) -> int:
    """How many items the tensor's memory spans, from its first element on."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _describe(tensor: Tensor, host: Tensor, link: DeviceLink) -> Described:
    """The ids of a lookup as the native half takes them; ``host`` has them as contiguous int64."""
    return (
        link.address(tensor), host.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size()
    )  # fmt: skip


def _name_of(tables: str, ids: Sequence[Tensor], link: DeviceLink) -> tuple[object, ...]:
    return (
        tables,
        *(
            (link.address(each), each.shape, each.stride(), each.dtype, 0 if each.is_inference() else each._version)
            for each in ids
        ),
    )


_steps: weakref.WeakValueDictionary[str, StepOnDevice] = weakref.WeakValueDictionary()


def register(table: str, step: StepOnDevice) -> None:
    """Says which session's step the lookups of a binding belong to; the entry ends with the session."""
    _steps[table] = step


def step_of(table: str) -> StepOnDevice:
    """The step of the session that has bound the table; a lookup of a served program has one of its own."""
    step = _steps.get(table)
    return _Unbound() if step is None else step


def current_step(table: str) -> int:
    """The number of the step that the session which has bound the table is in, as its rows count: a restore sets it
    back with the rows. -1 where no session has bound it."""
    step = _steps.get(table)
    return -1 if step is None else int(step._native.step) - step.steps_undone


class _Unbound(StepOnDevice):
    """The step of lookups that no session of this module's users has bound: they never train."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
