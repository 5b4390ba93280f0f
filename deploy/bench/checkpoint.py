"""``sparserow bench checkpoint``: measures saves and restores of one shard, against its disk and against training
without them.

The disk's own figures are for files like those of a checkpoint, in the same folder. They are written 64 MiB at a time
with fdatasync. They are read back after their pages were dropped (posix_fadvise), as a checkpoint's pages are before it
is restored. A restore is compared with the slowest of that, the first touch of as much memory, and 1 GB/s.

The latency of commits is that of an open loop. Pushes are due at fixed times, at half of the rate that a closed loop
reaches. Each has two times: that of the push itself (service), and that from when it was due, in which it
may have waited for earlier pushes.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...proto.checkpoint import manifest as files
from ...proto.checkpoint.folder import Folder
from ...proto.control import ControlClient
from ...proto.errors import DeadlineExceeded
from ...proto.optim import Adagrad
from ...proto.process.cores import available_cores
from ...worker.api.connect import connect
from ...worker.api.session import Session
from ...worker.session.table import KeyedRows
from ..launch.local_cluster import LocalCluster, local_cluster
from .harness import Figure

WRITE_LIMIT = 0.6
READ_LIMIT = 0.6
CHANGED_LIMIT = 0.05
SERVICE_LIMIT = 2.0
DUE_LIMIT = 2.5  # where server, saver and client have a CPU each
DUE_LIMIT_SHARED = 5.0
MEMORY_LIMIT = 0.1
COST_LIMIT = 0.02
_RESTORE_BOUND = 1000.0  # MB/s that a restore is compared with at most
_PIECE_BYTES = 64 << 20
_FILL_ROWS = 20_000
_SHARED_CPUS = 2  # with so few, server, saver and client share them
_MINUTE_SEC = 60.0
_RECOVERY_DEADLINE_SEC = 600.0
_CONNECT_DEADLINE_SEC = 60.0


@dataclass(frozen=True)
class CheckpointSize:
    """The sizes of one run.

    Args:
        rows: the number of rows of the table, which has Adagrad state.
        dim: the number of float32 columns.
        batch: the number of rows of a push.
        closed_sec: the duration of the closed loop that finds the rate, in seconds.
        samples: the number of pushes whose latency is measured, with saves and again without.
    """

    rows: int
    dim: int
    batch: int
    closed_sec: float
    samples: int


FULL = CheckpointSize(rows=5_000_000, dim=64, batch=1000, closed_sec=5.0, samples=3000)
QUICK = CheckpointSize(rows=30_000, dim=16, batch=200, closed_sec=0.3, samples=100)


def run_checkpoint(size: CheckpointSize, *, seed: int = 0) -> Iterator[Figure]:
    """Yields figures as they come, measured in a folder of the temporary directory (TMPDIR names another disk).

    Args:
        size: the sizes of the run; the full run takes about 6 GB of memory and 9 GB of disk.
        seed: the seed of keys.
    """
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="sparserow-bench-") as folder:
        url = str(Path(folder) / "ckpt")
        with local_cluster(shards=1) as cluster, connect(cluster.address, "bench", staleness=None) as session:
            table = session.create_table("rows", dim=size.dim, optimizer=Adagrad(lr=0.01))
            _fill(table, size)
            yield from _saves(session, table, url, size, random)
            busy = str(Path(folder) / "busy")
            yield from _while_saving(cluster, table, busy, size, random)
            yield from _recovery(cluster, busy)
        yield from _restores(url, size)


def _fill(table: KeyedRows, size: CheckpointSize) -> None:
    grads = np.ones((_FILL_ROWS, size.dim), np.float32)
    for begin in range(0, size.rows, _FILL_ROWS):
        keys = np.arange(begin, min(begin + _FILL_ROWS, size.rows), dtype=np.uint64)
        table.push(keys, grads[: len(keys)])


def _saves(
    session: Session, table: KeyedRows, url: str, size: CheckpointSize, random: np.random.Generator
) -> list[Figure]:
    took = _seconds(lambda: session.save(url, full_every=2))
    whole = files.read_manifest(Folder(url))
    disk = _write_like(Path(url) / "reference", whole.row_bytes)
    touched = random.choice(size.rows, size.rows // 100, replace=False).astype(np.uint64)
    for part in np.array_split(touched, max(1, len(touched) // size.batch)):
        table.push(part, np.ones((len(part), size.dim), np.float32))
    changed_took = _seconds(lambda: session.save(url, full_every=2))
    changed = files.read_manifest(Folder(url))
    shape = f"{size.rows:,} x {size.dim} + Adagrad"
    rate, disk_rate = whole.row_bytes / took / 1e6, whole.row_bytes / disk / 1e6
    return [
        Figure(f"disk, sequential write with fdatasync: {shape}", disk_rate, "MB/s"),
        Figure(f"save: {shape}", rate, "MB/s", WRITE_LIMIT, rate / disk_rate),
        Figure(
            f"bytes of a save after 1 % of the rows changed: {shape}",
            changed.row_bytes / 1e6,
            "MB",
            CHANGED_LIMIT,
            changed.row_bytes / whole.row_bytes,
            higher_is_better=False,
        ),
        Figure(f"seconds of a save after 1 % of the rows changed: {shape}", changed_took, "s"),
    ]


def _restores(url: str, size: CheckpointSize) -> list[Figure]:
    name = files.list_names(Folder(url))[0]
    whole = files.read_manifest(Folder(url), name)
    reference = Path(url) / "reference"
    _drop_pages(reference)
    disk = _seconds(lambda: _read_all(reference))
    touch = _seconds(lambda: _touch(whole.row_bytes))
    _drop_pages(Path(url) / name)
    with local_cluster(shards=1) as cluster, connect(cluster.address, "bench", staleness=None) as session:
        took = _seconds(lambda: session.restore(url, name=name))
    shape = f"{size.rows:,} x {size.dim} + Adagrad"
    rate, disk_rate, touch_rate = (whole.row_bytes / seconds / 1e6 for seconds in (took, disk, touch))
    bound = min(disk_rate, touch_rate, _RESTORE_BOUND)
    return [
        Figure(f"disk, sequential read, cold: {shape}", disk_rate, "MB/s"),
        Figure("first touch of as much memory", touch_rate, "MB/s"),
        Figure(f"restore onto an empty shard: {shape}", rate, "MB/s", READ_LIMIT, rate / bound),
        Figure("restore of one shard per GB", took / (whole.row_bytes / 1e9), "s"),
    ]


def _recovery(cluster: LocalCluster, url: str) -> list[Figure]:
    """Kills a shard, and measures the time until it serves again, including the start of its process."""
    size = files.read_manifest(Folder(url)).row_bytes

    def until_back() -> None:
        with ControlClient(cluster.address) as control:
            shard = control.status().shards[0]
            os.kill(shard.pid, signal.SIGKILL)
            deadline = time.monotonic() + _RECOVERY_DEADLINE_SEC
            while control.status().shards[0].restores == shard.restores:
                cluster.check()
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"the shard did not come back within {_RECOVERY_DEADLINE_SEC:.0f} s")
                time.sleep(0.01)

    took = _seconds(until_back)
    return [
        Figure(f"a killed shard of {size / 1e6:,.0f} MB serves again after", took, "s"),
        Figure("the same per GB", took / (size / 1e9), "s"),
    ]


def _while_saving(
    cluster: LocalCluster,
    table: KeyedRows,
    url: str,
    size: CheckpointSize,
    random: np.random.Generator,
) -> list[Figure]:
    """Measures latency and rate of pushes, with one save after another and without, and the memory of the shard."""
    grads = np.ones((size.batch, size.dim), np.float32)

    def push() -> None:
        keys = random.choice(size.rows, size.batch, replace=False, shuffle=False).astype(np.uint64)
        table.push(keys, grads)

    gc.collect()
    gc.freeze()  # a pause of this process's collector would be measured as the shard's
    idle_rate = _closed_loop(push, size.closed_sec)
    quiet = _open_loop(push, idle_rate / 2, size.samples)
    before = _resident_bytes(cluster.shard_pids[0])
    with _Saving(cluster.address, url) as saving, _Watch(cluster.shard_pids[0]) as watch:
        busy = _open_loop(push, idle_rate / 2, size.samples)
        busy_rate = _closed_loop(push, max(size.closed_sec, saving.longest()))
    lost = max(0.0, 1 - busy_rate / idle_rate) * min(1.0, saving.longest() / _MINUTE_SEC)
    manifest = files.read_manifest(Folder(url))
    side = manifest.stats["side_bytes_most"]
    has_spare = available_cores() > _SHARED_CPUS
    return [
        Figure("pushes in a closed loop, without a save", idle_rate, "1/s"),
        *_latencies("service time", quiet.service, busy.service, SERVICE_LIMIT, size, saving.count),
        *_latencies(
            "time from due",
            quiet.from_due,
            busy.from_due,
            DUE_LIMIT if has_spare else DUE_LIMIT_SHARED,
            size,
            saving.count,
        ),
        Figure(
            "side buffer of the last of them, at most",
            side / 1e6,
            "MB",
            MEMORY_LIMIT,
            side / max(1, manifest.row_bytes),
            higher_is_better=False,
        ),
        Figure("resident memory of the shard above that before, at most", (watch.most - before) / 1e6, "MB"),
        Figure("pushes in a closed loop, during saves", busy_rate, "1/s"),
        Figure(
            "share of pushes that a save every minute costs",
            lost,
            "share",
            COST_LIMIT,
            higher_is_better=False,
        ),
    ]


def _latencies(
    what: str, quiet: NDArray[np.float64], busy: NDArray[np.float64], limit: float, size: CheckpointSize, saves: int
) -> list[Figure]:
    p99_quiet, p99_busy = (float(np.percentile(each, 99)) * 1e3 for each in (quiet, busy))
    return [
        Figure(f"{what}: p99 of {size.samples:,} pushes of {size.batch} rows at half of that rate", p99_quiet, "ms"),
        Figure(
            f"{what}: p99 of the same during saves ({saves})",
            p99_busy,
            "ms",
            limit,
            p99_busy / p99_quiet,
            higher_is_better=False,
        ),
    ]


class _Saving:
    """Makes one save after another with a session of its own, for the duration of a block. The block begins when the
    session is connected.
    """

    def __init__(self, address: str, url: str) -> None:
        self._address, self._url = address, url
        self._ended = threading.Event()
        self._first = threading.Event()
        self._connected = threading.Event()
        self._seconds: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Saving:
        self._thread.start()
        if not self._connected.wait(_CONNECT_DEADLINE_SEC):
            raise DeadlineExceeded(f"the saver did not connect within {_CONNECT_DEADLINE_SEC:.0f} s")
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def count(self) -> int:
        """Returns the number of saves so far."""
        return len(self._seconds)

    def longest(self) -> float:
        """Returns the seconds of the longest save, after waiting for the first."""
        self._first.wait()
        return max(self._seconds)

    def _run(self) -> None:
        with connect(self._address, "bench", job="saver", staleness=None, rank=0, world_size=1) as session:
            self._connected.set()
            while not self._ended.is_set() or not self._seconds:
                self._seconds.append(_seconds(lambda: session.save(self._url, keep=1)))
                self._first.set()


class _Watch:
    """Measures the largest resident memory of a process during a block."""

    def __init__(self, pid: int) -> None:
        self._pid, self.most = pid, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self.most = max(self.most, _resident_bytes(self._pid))


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _closed_loop(call: Callable[[], None], seconds: float) -> float:
    began, calls = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        call()
        calls += 1
    return calls / took


@dataclass(frozen=True)
class _Latencies:
    """The seconds of each call, (n) each: of the call itself, and from when it was due to its end."""

    service: NDArray[np.float64]
    from_due: NDArray[np.float64]


def _open_loop(call: Callable[[], None], rate: float, samples: int) -> _Latencies:
    began = time.perf_counter()
    taken = _Latencies(np.empty(samples), np.empty(samples))
    for number in range(samples):
        due = began + number / rate
        time.sleep(max(0.0, due - time.perf_counter()))
        called = time.perf_counter()
        call()
        ended = time.perf_counter()
        taken.service[number], taken.from_due[number] = ended - called, ended - due
    return taken


def _write_like(folder: Path, size: int) -> float:
    folder.mkdir()
    piece = np.random.default_rng(1).bytes(min(_PIECE_BYTES, size))

    def write() -> None:
        for number, begin in enumerate(range(0, size, len(piece))):
            with open(folder / str(number), "wb", buffering=0) as file:
                file.write(piece[: size - begin])
                os.fdatasync(file.fileno())

    return _seconds(write)


def _drop_pages(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _touch(size: int) -> None:
    """Writes to each page of so much new memory, which has huge pages as a store's arenas."""
    with mmap.mmap(-1, max(1, size)) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 1


def _read_all(folder: Path) -> None:
    buffer = bytearray(4 << 20)
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
