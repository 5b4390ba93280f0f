"""``local_cluster``: a cluster on this machine for the duration of a script, a notebook or a test."""

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

from ...proto.config.config import ClusterConfig, LogConfig, validate
from ...proto.control import ShardAddress
from ...proto.errors import DeadlineExceeded, Unavailable, error_of
from .security_files import security_arguments

_STOP_DEADLINE_SEC = 30.0


class LocalCluster:
    """A running local cluster: one process for the coordinator and one per shard. Made by :func:`local_cluster`.

    Attributes:
        address: ``HOST:PORT`` of the coordinator, for ``connect``.
        shards: data-plane addresses, by index.
        shard_pids: process ids, by index.
        pid: of the coordinator's process, which is the parent of the shards'.
    """

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket, hello: dict[str, Any]) -> None:
        self._process = process
        self._link = link
        self._last_words: bytes | None = None
        self.address: str = hello["address"]
        self.shards = tuple(ShardAddress(index, host, port) for index, host, port, _ in hello["shards"])
        self.shard_pids: tuple[int, ...] = tuple(pid for *_, pid in hello["shards"])
        self.pid = process.pid

    def check(self) -> None:
        """Raises what ended the cluster, if it has ended.

        Raises:
            Unavailable: a shard or the coordinator is gone (the text says which).
        """
        code = self._process.poll()
        if code is not None:
            if self._last_words is None:
                self._link.settimeout(1.0)
                self._last_words = _read_line(self._link)
            raise _failure(self._last_words, code)

    def stop(self) -> None:
        """Stops all processes and waits for their end; harmless when they have stopped."""
        self._link.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(_STOP_DEADLINE_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children follow
            self._process.wait()


@contextlib.contextmanager
def local_cluster(
    *,
    shards: int = 2,
    memory_budget: int | str | None = None,
    ssd_path: str | os.PathLike[str] | None = None,
    ssd_bytes: int | str | None = None,
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
    """Starts a cluster on this machine and stops it at the end of the block, or with this process.

    Args:
        shards: parameter-server processes.
        memory_budget: bytes of rows and indexes per shard (``"8GiB"``); None is no budget.
        ssd_path: folder on an SSD for rows beyond the budget, which must be at least 16 MiB; None: memory alone.
        ssd_bytes: bytes of files per shard there (``"100GiB"``); None is what the disk has.
        sweep_every: seconds between sweeps of tables whose policy removes rows; None: by command alone.
        port: of the coordinator; 0 lets the system choose.
        slot_count: power of two in [2, 65536].
        io_threads: network threads of each shard.
        worker_lease: seconds of silence after which a worker is given up.
        shard_lease: seconds of silence after which a shard is given up.
        checkpoint_roots: absolute paths or URLs below which checkpoints are saved and restored; empty: any where no
            tokens are asked for, else none.
        log_level: least severity that the processes write to stderr.
        deadline_sec: within which the cluster must be ready.

    Raises:
        InvalidArgument: an option is out of range.
        Unavailable: the port is taken, or a process ended by itself, also while the block ran.
        DeadlineExceeded: not ready in time.
    """
    config = validate(
        ClusterConfig,
        {
            "shards": shards,
            "memory_budget": memory_budget,
            "ssd_path": None if ssd_path is None else os.fspath(ssd_path),
            "ssd_bytes": ssd_bytes,
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


def start_local(config: ClusterConfig, log: LogConfig, *, deadline_sec: float) -> LocalCluster:
    """Starts a cluster of ``config``; the caller stops it.

    Raises:
        SparserowError: as :func:`local_cluster`; nothing is left behind.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            _up_command(config, log, theirs.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C goes to the script, which then stops the cluster in order
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
    process.kill()  # its children follow
    process.wait()


def _failure(line: bytes, code: int) -> Exception:
    message = json.loads(line) if line else {}
    if "error" in message:
        return error_of(message["error"], message["message"])
    return Unavailable(f"the local cluster ended with exit code {code}; its messages are on stderr")


def _read_line(link: socket.socket) -> bytes:
    """One line, or what came before the other end was closed."""
    deadline = time.monotonic() + (link.gettimeout() or 0.0)
    line = b""
    while not line.endswith(b"\n"):
        link.settimeout(max(0.001, deadline - time.monotonic()))
        part = link.recv(4096)
        if not part:
            break
        line += part
    return line.strip()


def _up_command(config: ClusterConfig, log: LogConfig, parent_fd: int) -> list[str]:
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
    ]
