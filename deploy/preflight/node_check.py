"""Measures a node before a job: matrices on its devices, exchanges with its neighbours, a file on its disk.

Each part runs in a thread of its own, and the caller waits for it until a deadline. So a device, a peer or a disk that
hangs becomes a problem in the report, and the check goes on.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...proto.errors import DataLoss, DeadlineExceeded
from .node_verdict import Exchange, NodeReport, pairings

if TYPE_CHECKING:
    import torch

    from ...proto.config.node_check_config import NodeCheckConfig

_ROUNDS = 5
_CPU_SIDE, _CUDA_SIDE = 1024, 4096  # rows and columns of the square matrices
_CUDA_PRODUCTS = 10  # that are started before the device is waited for
_ROUND_SEC = 0.1  # the least time of a round of products
_EXCHANGED_FLOATS = 8 << 20  # 32 MiB each way in a round
_DISK_BLOCK_BYTES, _DISK_BLOCKS = 1 << 20, 16
_DISK_ROUNDS = 3

Value = TypeVar("Value")


@dataclass(frozen=True)
class CheckSettings:
    """What a check needs to know on every node.

    Attributes:
        slower_than: the factor above the median from which a node is slow.
        timeout_sec: the time for arriving, and for each part, in seconds.
        folder: the folder in which the file is written; None is the folder of temporary files.
        on_host: whether the CPU multiplies the matrices although there are CUDA devices.
    """

    slower_than: float = 2.0
    timeout_sec: float = 60.0
    folder: Path | None = None
    on_host: bool = False

    @classmethod
    def of(cls, config: NodeCheckConfig, folder: Path | None = None, *, on_host: bool = False) -> CheckSettings:
        """Returns the settings of the section ``train.node_check``, or of options that are checked as it is."""
        return cls(slower_than=config.slower_than, timeout_sec=config.timeout, folder=folder, on_host=on_host)

    @property
    def longest_sec(self) -> float:
        """The longest time that a node takes for a ring, in seconds: three exchanges, matrices and the disk."""
        return 5 * self.timeout_sec


def measure(
    settings: CheckSettings, index: int, ring: Sequence[int], store: Callable[[int], Any], *, tried: int = 0
) -> NodeReport:
    """Returns the report of this node; no failure is raised.

    The exchanges come first, as both sides of a pair need to be there. The pairing of number ``n`` ends after
    ``n + 1`` times the time-out, so that a node whose first exchange hangs is not late for its second.

    Args:
        settings: the settings of the check.
        index: the index of this node.
        ring: the indexes of all nodes that take part, in the order of the ring.
        store: connects to the store of a pair, given the pair's lower index; both nodes connect to it.
        tried: the number of rings before this one; only the first has matrices and the disk measured.
    """
    began = time.monotonic()
    exchanges = []
    for number, pairs in enumerate(pairings(ring)):
        for pair in pairs:
            if index in pair:
                peer = pair[1 - pair.index(index)]
                left = began + (number + 1) * settings.timeout_sec - time.monotonic()
                name = f"ring-{tried}-{min(pair)}-{max(pair)}"
                exchanges.append(_try_exchange(store, index, peer, name, left))
    if tried:
        return NodeReport(index, exchanges=tuple(exchanges))
    problems: list[str] = []

    def part(name: str, work: Callable[[], float]) -> float | None:
        try:
            return within(settings.timeout_sec, work)
        except Exception as error:  # a broken device raises errors of any class
            problems.append(f"{name} failed ({first_line(error)})")
            return None

    matrices_sec = part("matrices", lambda: slowest_device(on_host=settings.on_host))
    disk_sec = part("disk", lambda: time_disk(settings.folder))
    return NodeReport(index, matrices_sec, disk_sec, tuple(exchanges), tuple(problems))


def within(seconds: float, work: Callable[[], Value]) -> Value:
    """Returns what ``work`` returns, or raises what it raises; it runs in another thread.

    Raises:
        DeadlineExceeded: it did not end in time; its thread is left behind.
    """
    done = threading.Event()
    results: list[Value] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)
        done.set()

    threading.Thread(target=run, name="sparserow-node-check", daemon=True).start()
    if not done.wait(max(0.0, seconds)):
        raise DeadlineExceeded(f"it did not end in {seconds:.0f} s")
    if errors:
        raise errors[0]
    return results[0]


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text, at most 200 characters; its class when it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def slowest_device(*, on_host: bool = False) -> float:
    """Returns the time of a matrix product on the slowest device of this node, in seconds.

    The devices are all CUDA devices, or the CPU where torch has none.

    Args:
        on_host: whether the CPU is measured although there are CUDA devices.

    Raises:
        DataLoss: a device computed a wrong product; the text names the device.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() and not on_host else 0
    devices = [torch.device("cuda", at) for at in range(count)] or [torch.device("cpu")]
    return max(time_matrices(device) for device in devices)


def time_matrices(device: torch.device) -> float:
    """Returns the time of a matrix product on a device, in seconds: the median of some rounds of products.

    The factors are small integers, so each sum is exact in float32 whatever the order of its terms. The product is
    compared with ``a (b 1)`` in float64, which needs no matrix product.

    Raises:
        DataLoss: the product is wrong.
    """
    import torch

    side, together = (_CPU_SIDE, 1) if device.type == "cpu" else (_CUDA_SIDE, _CUDA_PRODUCTS)
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-4, 5, (side, side), generator=generator, dtype=torch.int8).to(device, torch.float32)
    b = torch.randint(-4, 5, (side, side), generator=generator, dtype=torch.int8).to(device, torch.float32)
    product = a @ b  # the first product loads libraries
    ones = torch.ones(side, dtype=torch.float64, device=device)
    sums = a.double() @ (b.double() @ ones)
    _wait_for(device)
    seconds = []
    for _ in range(_ROUNDS):
        began, products, passed = time.perf_counter(), 0, 0.0
        while passed < _ROUND_SEC:  # a fast device makes more products, so that each round is long enough to be timed
            for _ in range(together):
                torch.mm(a, b, out=product)
            _wait_for(device)
            products += together
            passed = time.perf_counter() - began
        seconds.append(passed / products)
        if not torch.equal(product.double() @ ones, sums):
            raise DataLoss(f"{device} computed a wrong product")
    return statistics.median(seconds)


def _wait_for(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _try_exchange(store: Callable[[int], Any], index: int, peer: int, name: str, timeout_sec: float) -> Exchange:
    try:
        seconds = within(timeout_sec, lambda: time_exchange(store(min(index, peer)), index, peer, name, timeout_sec))
    except Exception as error:  # torch has no common class for the errors of stores and groups
        return Exchange(peer, None, first_line(error))
    return Exchange(peer, seconds)


def time_exchange(store: Any, index: int, peer: int, name: str, timeout_sec: float) -> float:
    """Returns the median time in which this node and a peer send each other 32 MiB by gloo, in seconds.

    A first message is not timed, as this node waits in it for the peer to arrive.

    Args:
        store: a store that both reach.
        index: the index of this node.
        peer: the index of the peer, which calls this too.
        name: a name for this pair, which the store has not seen before.
        timeout_sec: the time that each wait may take, in seconds.

    Raises:
        DataLoss: other numbers arrived than the peer sends.
        RuntimeError: the peer cannot be reached, or does not answer in time.
    """
    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    rank, timeout = int(index > peer), timedelta(seconds=max(0.1, timeout_sec))
    group: Any = ProcessGroupGloo(PrefixStore(name, store), rank, 2, timeout)

    def swap(sent: torch.Tensor, received: torch.Tensor) -> None:
        for work in (group.send([sent], 1 - rank, 0), group.recv([received], 1 - rank, 0)):
            work.wait(timeout)

    swap(torch.zeros(1), torch.zeros(1))
    places = torch.arange(_EXCHANGED_FLOATS, dtype=torch.float32)  # whole numbers below 2**24 are exact
    sent, received, expected = places + index, torch.empty_like(places), places + peer
    seconds, is_whole = [], True
    for _ in range(_ROUNDS):
        received.zero_()
        began = time.perf_counter()
        swap(sent, received)
        seconds.append(time.perf_counter() - began)
        is_whole = is_whole and torch.equal(received, expected)
    if not is_whole:  # not before the last round, in which the peer waits for this node
        raise DataLoss("other numbers arrived than were sent")
    return statistics.median(seconds)


def time_disk(folder: Path | None) -> float:
    """Returns the median time for writing 16 MiB to the disk and reading them back, in seconds.

    The written pages are dropped from memory before they are read, where the file system allows it.

    Args:
        folder: the folder of the file, which is removed; None is the folder of temporary files.

    Raises:
        OSError: the folder cannot be written or read.
        DataLoss: other bytes are read than were written.
    """
    block = bytes(range(256)) * (_DISK_BLOCK_BYTES // 256)
    seconds = []
    for _ in range(_DISK_ROUNDS):
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".sparserow-node-check-", buffering=0) as file:
            began = time.perf_counter()
            for _ in range(_DISK_BLOCKS):
                _write_all(file, block)
            os.fdatasync(file.fileno())
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            for _ in range(_DISK_BLOCKS):
                if _read_all(file, len(block)) != block:
                    raise DataLoss(f"{file.name}: other bytes were read than were written")
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _write_all(file: Any, block: bytes) -> None:
    left = memoryview(block)
    while left:
        left = left[file.write(left) :]


def _read_all(file: Any, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = file.read(size - len(parts))
        if not part:
            break
        parts += part
    return bytes(parts)
