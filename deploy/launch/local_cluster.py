"""``local_cluster``: runs a cluster on this machine for the duration of a script, a notebook or a test."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ...proto.cluster_view import ShardAddress
from ...proto.config.cluster_config import ClusterConfig
from ...proto.config.log_config import LogConfig
from ...proto.errors import DeadlineExceeded, Unavailable, error_of
from ...proto.options.document import validate
from .security_files import security_arguments

_STOP_DEADLINE_SEC = 30.0


class LocalCluster:
    """A running local cluster, made by :func:`local_cluster`: one process for the coordinator and one per shard.

    Attributes:
        address: ``HOST:PORT`` of the coordinator, for ``connect``.
        shards: the data-plane addresses of the shards, by index.
        shard_pids: the process ids of the shards, by index.
        page: the URL of the page for browsers; empty where none is served.
        pid: the id of the coordinator's process, which is the parent of the shards' processes.
    """

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket, hello: dict[str, Any]) -> None:
        self._process = process
        self._link = link
        self._last_words: bytes | None = None
        self.address: str = hello["address"]
        self.page: str = hello["page"]
        self.shards = tuple(ShardAddress(index, host, port) for index, host, port, _ in hello["shards"])
        self.shard_pids: tuple[int, ...] = tuple(pid for *_, pid in hello["shards"])
        self.pid = process.pid

    def check(self) -> None:
        """Raises the error that ended the cluster, if it has ended.

        Raises:
            Unavailable: a shard or the coordinator has ended; the text says which.
        """
        code = self._process.poll()
        if code is not None:
            if self._last_words is None:
                self._link.settimeout(1.0)
                self._last_words = _read_line(self._link)
            raise _failure(self._last_words, code)

    def stop(self) -> None:
        """Stops all processes and waits for their end; the call is harmless when they have stopped."""
        self._link.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(_STOP_DEADLINE_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children end with it
            self._process.wait()


@contextlib.contextmanager
def local_cluster(
    *,
    shards: int = 2,
    memory_budget: int | str | None = None,
    ssd_path: str | os.PathLike[str] | None = None,
    ssd_bytes: int | str | None = None,
    ssd_engine: str | None = None,
    ssd_direct_io: bool = False,
    sweep_every: float | str | None = 60.0,
    port: int = 0,
    slot_count: int = 16384,
    io_threads: int = 2,
    worker_lease: float | str = 10.0,
    shard_lease: float | str = 10.0,
    checkpoint_roots: Sequence[str] = (),
    log_level: str = "warning",
    deadline_sec: float = 60.0,
) -> Iterator[LocalCluster]:
    """Starts a cluster on this machine, and stops it at the end of the block or with this process.

    Args:
        shards: the number of parameter servers.
        memory_budget: the budget of rows and indexes per shard, in bytes or as text (``"8GiB"``); None means no budget.
        ssd_path: the folder on an SSD for rows beyond the budget, which must be at least 16 MiB; None keeps all rows in
            memory.
        ssd_bytes: the bound on files there per shard, in bytes or as text (``"100GiB"``); None means what the disk has.
        ssd_engine: the storage of rows there, ``pages`` or ``rocksdb``; None means ``pages``.
        ssd_direct_io: whether ``pages`` reads and writes there past the system's cache.
        sweep_every: the seconds between sweeps of tables whose policy removes rows; None sweeps by command alone.
        port: the port of the coordinator; 0 lets the system choose.
        slot_count: the number of slots, a power of two in [2, 65536].
        io_threads: the number of network threads of each shard.
        worker_lease: the seconds without a heartbeat after which a worker loses its place.
        shard_lease: the seconds without a heartbeat after which a shard counts as lost.
        checkpoint_roots: absolute paths or URLs below which checkpoints are saved and restored. Without any, every
            place is allowed while the cluster asks for no tokens, and none otherwise.
        log_level: the lowest severity that the processes write to stderr.
        deadline_sec: the time in which the cluster must be ready, in seconds.

    Yields:
        The running cluster.

    Raises:
        InvalidArgument: an option is out of range.
        Unavailable: the port is taken, or a process ended by itself, also while the block ran.
        DeadlineExceeded: the cluster was not ready in time.
    """
    config = validate(
        ClusterConfig,
        {
            "shards": shards,
            "memory_budget": memory_budget,
            "ssd_path": None if ssd_path is None else os.fspath(ssd_path),
            "ssd_bytes": ssd_bytes,
            **({} if ssd_engine is None else {"ssd_engine": ssd_engine}),
            **({"ssd_direct_io": True} if ssd_direct_io else {}),
            "sweep_every": sweep_every,
            "port": port,
            "slot_count": slot_count,
            "io_threads": io_threads,
            "worker_lease": worker_lease,
            "shard_lease": shard_lease,
            "checkpoint_roots": [*checkpoint_roots],
        },
    )
    log = validate(LogConfig, {"level": log_level})
    cluster = start_local(config, log, deadline_sec=deadline_sec)
    try:
        yield cluster
        cluster.check()
    finally:
        cluster.stop()


def start_local(
    config: ClusterConfig, log: LogConfig, *, deadline_sec: float, page_port: int | None = None
) -> LocalCluster:
    """Starts a cluster of ``config``, which the caller has to stop.

    Args:
        config, log: the options of the cluster and of its logs.
        deadline_sec: the time in which it must be ready, in seconds.
        page_port: the port of its page for browsers; 0 lets the system choose, None means no page.

    Raises:
        SparserowError: as for :func:`local_cluster`; all processes have ended then.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            _up_command(config, log, theirs.fileno(), page_port),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C reaches the script alone, which then stops the cluster in order
        )
    try:
        ours.settimeout(deadline_sec)
        line = _read_line(ours)
        hello = json.loads(line) if line else {}
        if "address" in hello:
            return LocalCluster(process, ours, hello)
        process.wait(deadline_sec)
        raise _failure(line, process.returncode)
    except (TimeoutError, subprocess.TimeoutExpired):
        _abandon(process, ours)
        raise DeadlineExceeded(f"the local cluster was not ready within {deadline_sec:g} s") from None
    except BaseException:
        _abandon(process, ours)
        raise


def _abandon(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    process.kill()  # its children end with it
    process.wait()


def _failure(line: bytes, code: int) -> Exception:
    message = json.loads(line) if line else {}
    if "error" in message:
        return error_of(message["error"], message["message"])
    return Unavailable(f"the local cluster ended with exit code {code}; its messages are on stderr")


def _read_line(link: socket.socket) -> bytes:
    """Returns one line, or what came before the other end was closed."""
    deadline = time.monotonic() + (link.gettimeout() or 0.0)
    line = b""
    while not line.endswith(b"\n"):
        link.settimeout(max(0.001, deadline - time.monotonic()))
        part = link.recv(4096)
        if not part:
            break
        line += part
    return line.strip()


def _up_command(config: ClusterConfig, log: LogConfig, parent_fd: int, page_port: int | None) -> list[str]:
    return [
        sys.executable,
        "-m",
        f"{__package__.rpartition('.')[0]}.cli",
        *security_arguments(),
        "up",
        f"--cluster-json={config.handed_down()}",
        f"--log-format={log.format}",
        f"--log-level={log.level}",
        f"--parent-fd={parent_fd}",
        *(() if page_port is None else (f"--page-port={page_port}",)),
    ]
