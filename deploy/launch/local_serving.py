"""``local_serving``: runs serving processes on this machine for the duration of a script, a notebook or a test."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...proto.errors import InvalidArgument, Unavailable
from .child_processes import first_line, stop
from .security_files import security_arguments

_STOP_DEADLINE_SEC = 30.0
_READY = re.compile(r"ready at gRPC (\S+:\d+), data plane (\S+:\d+)")


@dataclass(frozen=True)
class LocalServing:
    """Running serving processes.

    Attributes:
        addresses: ``HOST:PORT`` of each process's gRPC server, for ``ServingClient``.
        pids: the ids of the processes.
    """

    addresses: tuple[str, ...]
    pids: tuple[int, ...]


@contextlib.contextmanager
def local_serving(
    model: str,
    *,
    root: str | None = None,
    follow: str | None = None,
    namespace: str | None = None,
    shards: int = 1,
    replicas: int = 1,
    sync_interval: str | None = None,
    poll: str | None = None,
    log_level: str = "warning",
    deadline_sec: float = 60.0,
) -> Iterator[LocalServing]:
    """Starts serving processes on this machine, and stops them at the end of the block.

    Each process answers for every key over gRPC, also when the slots are split between them, because they know each
    other.

    Args:
        model: ``NAME[@ALIAS|@VERSION]``.
        root: the folder of published models; None serves the rows of the cluster at ``follow``.
        follow: ``HOST:PORT`` of the training cluster's coordinator; None means no live sync.
        namespace: the namespace of the tables, when there is no root.
        shards: the number of parts into which the slots are split.
        replicas: the number of processes that serve each part.
        sync_interval: the time between rounds of live sync, as in ``sparserow serve``; None: 100 ms.
        poll: the time between checks of the aliases; None: 500 ms for a folder, 5 s for a URL.
        log_level: the lowest severity that the processes write to stderr.
        deadline_sec: the time in which all processes must be ready, in seconds.

    Yields:
        The running processes.

    Raises:
        InvalidArgument: ``shards`` or ``replicas`` is below 1.
        Unavailable: a process ended before it was ready; its message is on stderr.
        DeadlineExceeded: a process was not ready in time.
    """
    if shards < 1 or replicas < 1:
        raise InvalidArgument(f"local_serving: shards {shards}, replicas {replicas}; allowed: >= 1")
    options = {"root": root, "follow": follow, "namespace": namespace}
    options.update({"sync-interval": sync_interval, "poll": poll})
    named = [f"--{name}={value}" for name, value in options.items() if value is not None]
    named += [f"--model={model}", f"--log-level={log_level}"]
    processes: list[subprocess.Popen[str]] = []
    places = [(shard, replica) for shard in range(shards) for replica in range(replicas)]
    try:
        with contextlib.ExitStack() as reserved:
            ports = [0 for _ in places]
            if shards > 1:
                ports = [reserved.enter_context(_reserved_port()) for _ in places]
                named.append(f"--peers={','.join(f'127.0.0.1:{port}' for port in ports)}")
            for (shard, replica), port in zip(places, ports, strict=True):
                place = [f"--shard={shard}/{shards}", f"--replica={replica}", f"--port={port}"]
                processes.append(_start([*named, *place]))
            deadline = time.monotonic() + deadline_sec
            addresses = tuple(_ready_address(process, deadline) for process in processes)
        yield LocalServing(addresses, tuple(process.pid for process in processes))
    finally:
        stop(processes, _STOP_DEADLINE_SEC)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Yields a free port that the system gives to no other process meanwhile.

    A socket is bound to the port and never listens, so that a process that names the port can use it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def _start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        f"{__package__.rpartition('.')[0]}.cli",
        *security_arguments(),
        "serve",
        *arguments,
    ]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the script alone, which then stops the processes in order
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def _ready_address(process: subprocess.Popen[str], deadline: float) -> str:
    match = _READY.search(first_line(process, deadline, "sparserow serve"))
    if match is None:
        code = process.wait(_STOP_DEADLINE_SEC)
        raise Unavailable(
            f"sparserow serve: the process ended with exit code {code} before it was ready; its message is on stderr"
        )
    return match[1]
