"""Checks a machine, its files and its ports for ``sparserow doctor``, and says what to do about problems."""

from __future__ import annotations

import ctypes
import os
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...proto.config.job import JobConfig
from ...proto.coordinators import parse_address
from ...proto.errors import SparserowError
from ...proto.options.document import load_config
from ...proto.options.units import format_bytes
from ...proto.process.cores import available_cores
from ...proto.process.listen import check_port_free
from .finding import Finding

LEAST_FILES = 8192  # descriptors: a shard's 4,096 connections, its files, and as much again
LEAST_DISK_BYTES = 1 << 30
_SLOW_SYNC_SEC = 0.02
_SYNCS = 32
_CLOCK_BUILT = 1_700_000_000  # a clock before this time is wrong


@dataclass(frozen=True)
class MachineFacts:
    """The state of the machine as the kernel reports it, read by :func:`machine_facts`."""

    cores: int
    huge_pages: str
    available_bytes: int
    files: int
    clock_is_synchronized: bool
    unix_sec: float


def machine_facts(root: Path = Path("/")) -> MachineFacts:
    """Returns the facts of this process's machine and container.

    Args:
        root: the folder that has /proc and /sys.
    """
    memory = {line.split(":")[0]: line.split()[1] for line in _text(root / "proc/meminfo").splitlines() if ":" in line}
    available = int(memory.get("MemAvailable", "0")) * 1024
    limit = _text(root / "sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        available = min(available, int(limit) - int(_text(root / "sys/fs/cgroup/memory.current").strip() or 0))
    modes = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return MachineFacts(
        cores=available_cores(root),
        huge_pages=modes.partition("[")[2].partition("]")[0] or "unknown",
        available_bytes=max(0, available),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        clock_is_synchronized=_clock_is_synchronized(),
        unix_sec=time.time(),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _clock_is_synchronized() -> bool:
    """Whether a service keeps the kernel's clock right, by adjtimex(2); True where the call is not permitted."""
    buffer = (ctypes.c_char * 512)()  # struct timex, all 0, so that the call sets nothing
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    return bool(state != 5)  # TIME_ERROR


def check_machine(facts: MachineFacts, memory_budget_bytes: int) -> Iterator[Finding]:
    """Checks cores, huge pages, memory, file descriptors and clock.

    Args:
        facts: the facts of the machine.
        memory_budget_bytes: the budget of its shards together, in bytes; 0 when it is not known.
    """
    if facts.cores < 2:
        yield Finding("machine", "warning", "1 core", "give each shard at least 2, one of them for its network")
    else:
        yield Finding("machine", "ok", f"{facts.cores} cores")
    if facts.huge_pages in ("always", "madvise"):
        yield Finding("machine", "ok", f"huge pages: {facts.huge_pages}")
    else:
        yield Finding(
            "machine",
            "warning",
            f"huge pages: {facts.huge_pages}; rows are read up to a third slower",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    available = format_bytes(facts.available_bytes)
    if memory_budget_bytes > facts.available_bytes:
        yield Finding(
            "machine",
            "wrong",
            f"{available} of memory are available, the budget is {format_bytes(memory_budget_bytes)}",
            "lower --memory-budget, or give the machine or container more memory",
        )
    else:
        yield Finding("machine", "ok", f"{available} of memory are available")
    if facts.files < LEAST_FILES:
        yield Finding(
            "machine",
            "wrong",
            f"{facts.files} open files are allowed; a shard may need {LEAST_FILES}",
            "ulimit -n 65536, or LimitNOFILE=65536 in its systemd unit",
        )
    else:
        yield Finding("machine", "ok", f"{facts.files} open files are allowed")
    if facts.unix_sec < _CLOCK_BUILT:
        when = time.strftime("%Y-%m-%d", time.gmtime(facts.unix_sec))
        yield Finding("machine", "wrong", f"the clock says {when}", "set it, and run chrony or systemd-timesyncd")
    elif not facts.clock_is_synchronized:
        yield Finding(
            "machine",
            "warning",
            "no service keeps the clock right: certificates, freshness and eviction by age go by it",
            "run chrony or systemd-timesyncd, or set the host's clock",
        )
    else:
        yield Finding("machine", "ok", "the clock is synchronized")


_PARTS: tuple[Literal["train"], Literal["test"]] = ("train", "test")


def check_job(path: Path, *, has_torch: bool = True) -> Iterator[Finding]:
    """Checks a job file: its data files exist, have its columns, and their first lines can be read.

    Args:
        path: the job file.
        has_torch: whether torch can be imported; without it only the keys of the file are checked.
    """
    try:
        job = load_config(JobConfig, path).of_first_day
    except SparserowError as error:
        yield Finding("config", "wrong", str(error), "correct the file; docs/configuration.md lists its keys")
        return
    yield Finding("config", "ok", f"{path}: job {job.name}")
    if not has_torch:
        yield Finding("config", "wrong", f"{path}: a job needs torch", "install torch as the finding of torch says")
        return
    from ...worker.data.sources import find_files

    is_complete = True
    for which in _PARTS:
        try:
            find_files(job.data, which)
        except SparserowError as error:
            is_complete = False
            yield Finding("config", "wrong", str(error), "correct the path")
    if is_complete:
        yield _first_samples(job)


def _first_samples(job: JobConfig) -> Finding:
    """Checks the columns and the beginning of each data file, read as training reads them."""
    from ...worker.data.sources.open_reader import check_first_samples
    from ...worker.training.build_model import check_data

    try:
        check_data(job)
        files = sum(check_first_samples(job.data, which) for which in _PARTS)
    except SparserowError as error:
        return Finding("config", "wrong", str(error), "correct the key that it names, or the file")
    return Finding("config", "ok", f"{files} data files have the job's columns, and their first lines can be read")


def check_ports(addresses: Sequence[str]) -> Iterator[Finding]:
    """Checks whether a server can listen on each HOST:PORT.

    Raises:
        InvalidArgument: an address is not of the form HOST:PORT.
    """
    for address in addresses:
        host, port = parse_address(address, what="--listen")
        try:
            check_port_free(host, port)
        except OSError as error:  # Unavailable is an OSError; other ones mean that the host is not this machine
            yield Finding(
                "ports",
                "wrong",
                f"{address}: {error}",
                "choose another port, or end the process that uses it: ss -ltnp",
            )
        else:
            yield Finding("ports", "ok", f"{address} is free")


def check_disk(folder: Path, need_bytes: int) -> Iterator[Finding]:
    """Checks a folder for rows on the SSD, checkpoints or a coordinator's state.

    Args:
        folder: the folder; the check writes a file there and removes it.
        need_bytes: the free space that is needed, in bytes; 0 means a gibibyte.
    """
    if not folder.is_dir():
        yield Finding(
            "disk", "wrong", f"{folder}: there is no such folder", f"mkdir -p {folder}, on the disk that is meant"
        )
        return
    free = os.statvfs(folder)
    free_bytes, need = free.f_bavail * free.f_frsize, need_bytes or LEAST_DISK_BYTES
    if free_bytes < need:
        yield Finding(
            "disk",
            "wrong",
            f"{folder}: {format_bytes(free_bytes)} are free, {format_bytes(need)} are needed",
            "free some, or name a larger disk",
        )
    else:
        yield Finding("disk", "ok", f"{folder}: {format_bytes(free_bytes)} are free")
    if free.f_files and not free.f_favail:
        yield Finding("disk", "wrong", f"{folder}: no inode is free", "remove files, or create a larger file system")
    try:
        seconds = sync_times(folder)
    except OSError as error:
        yield Finding(
            "disk",
            "wrong",
            f"{folder}: the folder cannot be written: {error.strerror}",
            "chown it to the user that runs the shard",
        )
        return
    typical, worst = statistics.median(seconds), max(seconds)
    text = f"{folder}: a written block reaches the disk in {typical * 1e3:.2f} ms, {worst * 1e3:.1f} ms at most"
    if typical > _SLOW_SYNC_SEC:
        yield Finding("disk", "warning", text, "use an SSD: saves and rows beyond the memory budget wait for it")
    else:
        yield Finding("disk", "ok", text)


def sync_times(folder: Path) -> list[float]:
    """Returns the seconds that each of some writes of 4 KiB takes until fdatasync has returned.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / f".sparserow-doctor-{os.getpid()}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        seconds = []
        for _ in range(_SYNCS):
            began = time.perf_counter()
            os.write(descriptor, bytes(4096))
            os.fdatasync(descriptor)
            seconds.append(time.perf_counter() - began)
        return seconds
    finally:
        os.close(descriptor)
        path.unlink()
