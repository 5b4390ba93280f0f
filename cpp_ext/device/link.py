"""The seam between the host and a device: every copy, event and stream of the package goes through a ``DeviceLink``.

A copy to the device runs on a stream of its own, beside what the device computes; a copy back runs behind it. What
crosses is counted on every device alike, so that a test on any machine sees what a step costs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass
class Crossings:
    """What has crossed between the host and one device since the link was made.

    Attributes:
        to_device: copies from the host to the device.
        to_host: copies from the device to the host.
        bytes_to_device: bytes of the former.
        bytes_to_host: bytes of the latter.
        waits: how often the host waited for the device.
    """

    to_device: int = 0
    to_host: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    waits: int = 0

    def count_send(self, host: Tensor) -> None:
        """Counts a copy of a host tensor to the device."""
        self.to_device += 1
        self.bytes_to_device += host.nbytes

    def count_fetch(self, tensor: Tensor) -> None:
        """Counts a copy of a device tensor to the host."""
        self.to_host += 1
        self.bytes_to_host += tensor.nbytes


@dataclass(frozen=True)
class Sent:
    """Bytes on their way to the device.

    Attributes:
        tensor: (n) uint8 on the device; :meth:`DeviceLink.receive` says when it may be read.
        ready: the event after which they are there; None when they are there already.
    """

    tensor: Tensor
    ready: Any = None


@dataclass(frozen=True)
class Fetched:
    """A tensor on its way to the host.

    Attributes:
        tensor: on the host, of the same shape and dtype; :meth:`DeviceLink.wait` says when it may be read.
        ready: the event after which it is there; None when it is there already.
    """

    tensor: Tensor
    ready: Any = None


class DeviceLink(Protocol):
    """Copies between the host and one device. Any thread may call it.

    To add a kind of device: a class with this interface, and a call of :func:`register_link`.

    Attributes:
        device: the device.
        crossings: counts of this link.
    """

    device: torch.device
    crossings: Crossings

    def host_buffer(self, size: int) -> Tensor:
        """(size) uint8 on the host, in memory that the device can read directly."""
        ...

    def send(self, host: Tensor) -> Sent:
        """Begins to copy a host buffer, (n) uint8, to the device; the caller no longer writes to it."""
        ...

    def receive(self, sent: Sent) -> Tensor:
        """What was sent; work that the caller queues on the device from now on runs after it is there."""
        ...

    def fetch(self, tensor: Tensor) -> Fetched:
        """Begins to copy a contiguous tensor of the device to the host, behind what was queued before."""
        ...

    def wait(self, fetched: Fetched) -> Tensor:
        """What was fetched, after it is there."""
        ...

    def mark(self) -> Any:
        """An event behind all that the caller has queued on the device."""
        ...

    def after(self, mark: Any) -> None:
        """What the caller queues from now on runs after :meth:`mark` of another thread; None: after nothing."""
        ...

    def address(self, tensor: Tensor) -> int:
        """The address of a tensor's first element, on whichever side it lies; views of one memory differ by bytes."""
        ...

    def free_bytes(self) -> int:
        """What is free of the device's memory."""
        ...


class HostLink:
    """The link to the host itself, for kernels that run under Triton's interpreter: copies are copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.crossings = Crossings()

    def host_buffer(self, size: int) -> Tensor:
        """See :class:`DeviceLink`."""
        return torch.empty(size, dtype=torch.uint8)

    def send(self, host: Tensor) -> Sent:
        """See :class:`DeviceLink`."""
        self.crossings.count_send(host)
        return Sent(host.to(self.device, copy=True))

    def receive(self, sent: Sent) -> Tensor:
        """See :class:`DeviceLink`."""
        return sent.tensor

    def fetch(self, tensor: Tensor) -> Fetched:
        """See :class:`DeviceLink`."""
        self.crossings.count_fetch(tensor)
        return Fetched(tensor.to("cpu", copy=True))

    def wait(self, fetched: Fetched) -> Tensor:
        """See :class:`DeviceLink`."""
        self.crossings.waits += 1
        return fetched.tensor

    def mark(self) -> Any:
        """See :class:`DeviceLink`. The host does one thing after another."""

    def after(self, mark: Any) -> None:
        """See :class:`DeviceLink`."""

    def address(self, tensor: Tensor) -> int:
        """See :class:`DeviceLink`."""
        return tensor.data_ptr()

    def free_bytes(self) -> int:
        """See :class:`DeviceLink`."""
        try:
            with open("/proc/meminfo") as facts:  # what programs can have, the page cache included
                return next(1024 * int(line.split()[1]) for line in facts if line.startswith("MemAvailable:"))
        except (OSError, StopIteration):
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class CudaLink:
    """The link to a CUDA device: pinned memory, and a stream for copies to the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.crossings = Crossings()
        self._stream = torch.cuda.Stream(self.device)

    def host_buffer(self, size: int) -> Tensor:
        """See :class:`DeviceLink`. torch gives pinned memory out again once the copies that read it are done."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def send(self, host: Tensor) -> Sent:
        """See :class:`DeviceLink`."""
        self.crossings.count_send(host)
        with torch.cuda.stream(self._stream):
            return Sent(host.to(self.device, non_blocking=True), self._stream.record_event())

    def receive(self, sent: Sent) -> Tensor:
        """See :class:`DeviceLink`. The memory is kept until the current stream has used it."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(sent.ready)
        sent.tensor.record_stream(stream)
        return sent.tensor

    def fetch(self, tensor: Tensor) -> Fetched:
        """See :class:`DeviceLink`."""
        self.crossings.count_fetch(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return Fetched(host, torch.cuda.current_stream(self.device).record_event())

    def wait(self, fetched: Fetched) -> Tensor:
        """See :class:`DeviceLink`."""
        self.crossings.waits += 1
        fetched.ready.synchronize()
        return fetched.tensor

    def mark(self) -> Any:
        """See :class:`DeviceLink`."""
        return torch.cuda.current_stream(self.device).record_event()

    def after(self, mark: Any) -> None:
        """See :class:`DeviceLink`."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def address(self, tensor: Tensor) -> int:
        """See :class:`DeviceLink`."""
        return tensor.data_ptr()

    def free_bytes(self) -> int:
        """See :class:`DeviceLink`."""
        return int(torch.cuda.mem_get_info(self.device)[0])


_MAKERS: dict[str, Callable[[torch.device], DeviceLink]] = {"cpu": HostLink, "cuda": CudaLink}
_LINKS: dict[torch.device, DeviceLink] = {}


def register_link(kind: str, make: Callable[[torch.device], DeviceLink]) -> None:
    """Makes a kind of device known.

    Args:
        kind: ``device.type`` of the devices.
        make: what makes the link of one device.
    """
    _MAKERS[kind] = make


def link_of(device: torch.device) -> DeviceLink:
    """The one link of this process to a device.

    Raises:
        ValueError: no link is known for devices of this kind, or this machine has no such device.
    """
    if device.type == "cuda":
        _check_cuda(device)
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device not in _LINKS:
        make = _MAKERS.get(device.type)
        if make is None:
            raise ValueError(f"device: {str(device)!r} is not allowed; allowed: {', '.join(sorted(_MAKERS))}")
        _LINKS[device] = make(device)
    return _LINKS[device]


def _check_cuda(device: torch.device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError(f"device: {str(device)!r} is not allowed; torch {torch.__version__} finds no CUDA device")
    if device.index is not None and device.index >= count:
        allowed = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ValueError(f"device: {str(device)!r} is not allowed; allowed: {allowed}")


def numbers_of(values: Tensor) -> Any:
    """The values of a small tensor as Python's numbers, in lists of its shape; one wait for its device."""
    if values.device.type == "cpu":
        return values.tolist()
    link = link_of(values.device)
    return link.wait(link.fetch(values.contiguous())).tolist()
