"""Runs a whole cluster on this machine: the coordinator in this process, and one child process per shard.

``sparserow up`` uses it, and through that command ``local_cluster``. Children never outlive this process, because each
asks the kernel for that (proto/process/parent.py). Therefore ``run_embedded`` must run on the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from ...proto.config.cluster_config import ClusterConfig
from ...proto.config.log_config import LogConfig
from ...proto.coordinators import parse_address
from ...proto.errors import DeadlineExceeded, Unavailable
from ...proto.process.advertise import is_wildcard
from ...proto.process.listen import is_loopback
from ...proto.process.stopping import StopRequest
from ...ps_server.coordinator.server import Coordinator, CoordinatorOptions, run_coordinator
from ...ps_server.coordinator.state.cluster import Cluster, ClusterOptions
from .security_files import security_arguments

READY_DEADLINE_SEC = 60.0
_DRAIN_SEC = 10.0
_KILL_AFTER_SEC = _DRAIN_SEC + 5.0
_READY_POLL_SEC = 0.02
_FAILURE_POLL_SEC = 0.2
_MOST_RESTARTS, _RESTARTS_WITHIN_SEC = 3, 60.0  # how often one shard may be restarted within that time

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EmbeddedOptions:
    """The options of a cluster on this machine.

    Args:
        cluster: shards, budget, port, slots and leases; its ``address`` is None.
        log: the log options of all its processes.
        host, insecure: the address and the acceptance of unprotected connections, for all its servers.
        advertise: ``HOST[:PORT]`` of the coordinator that other processes use, and HOST for the shards; None chooses it
            as in proto/process/advertise.py.
        metrics_port: the port of the coordinator's Prometheus page; shard i has the port i + 1 further. None means no
            pages.
        page_port: the port of the coordinator's page for browsers; None means no page.
    """

    cluster: ClusterConfig
    log: LogConfig
    host: str = "127.0.0.1"
    insecure: bool = False
    metrics_port: int | None = None
    advertise: str | None = None
    page_port: int | None = None


@dataclass(frozen=True)
class ShardProcess:
    """A child process of one shard, and the address on which its data plane listens."""

    index: int
    host: str
    port: int
    pid: int


@dataclass(frozen=True)
class EmbeddedCluster:
    """A cluster that is ready: the coordinator's address, the URL of its page, and the processes of the shards."""

    address: str
    page: str
    shards: tuple[ShardProcess, ...]


async def run_embedded(
    options: EmbeddedOptions, stop: StopRequest, on_ready: Callable[[EmbeddedCluster], None]
) -> None:
    """Runs a cluster until it is asked to stop; every process has ended when this returns.

    Args:
        options: the options of the cluster.
        stop: asks the cluster to stop.
        on_ready: called once the cluster is ready.

    Raises:
        Unavailable: the process of a shard ended by itself and could not be restored. All others are stopped, and its
            rows are lost: start a new cluster from a checkpoint.
        DeadlineExceeded: the cluster was not ready within ``READY_DEADLINE_SEC``.
        SparserowError: an option or a port is not allowed.
    """
    coordinator_options = CoordinatorOptions(
        cluster=ClusterOptions.of_config(options.cluster, is_loopback=is_loopback(options.host)),
        host=options.host,
        port=options.cluster.port,
        advertise=options.advertise,
        insecure=options.insecure,
        metrics_port=options.metrics_port,
        page_port=options.page_port,
    )
    async with run_coordinator(coordinator_options) as coordinator, _children(options, coordinator.address) as children:
        loop = asyncio.get_running_loop()
        stopping = loop.create_task(stop.wait())
        ended = loop.create_task(_supervise(options, coordinator, children))
        ready = loop.create_task(_until_ready(coordinator.cluster))
        try:
            await asyncio.wait((ready, stopping, ended), return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done() and not ended.done():
                ready.result()
                on_ready(_describe(coordinator, children))
                await asyncio.wait((stopping, ended), return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                raise Unavailable(ended.result())
        finally:
            for task in (ready, stopping, ended):
                task.cancel()
            await asyncio.gather(ready, stopping, ended, return_exceptions=True)


def _describe(coordinator: Coordinator, children: list[asyncio.subprocess.Process]) -> EmbeddedCluster:
    shards = tuple(
        ShardProcess(shard.index, shard.data[0], shard.data[1], child.pid)
        for shard, child in zip(coordinator.cluster.shards.shards, children, strict=True)
        if shard.data is not None
    )
    return EmbeddedCluster(coordinator.address, coordinator.page, shards)


async def _until_ready(cluster: Cluster) -> None:
    deadline = asyncio.get_running_loop().time() + READY_DEADLINE_SEC
    while problem := cluster.shards.problem():
        if asyncio.get_running_loop().time() > deadline:
            raise DeadlineExceeded(f"the cluster was not ready within {READY_DEADLINE_SEC:.0f} s: {problem}")
        await asyncio.sleep(_READY_POLL_SEC)


async def _supervise(
    options: EmbeddedOptions, coordinator: Coordinator, children: list[asyncio.subprocess.Process]
) -> str:
    """Restarts shards that end by themselves and can be restored from a checkpoint, at their old addresses.

    Returns:
        Why the cluster has to end: which shard cannot be restored, and how it ended.
    """
    watches = [
        asyncio.create_task(_restart_shard(options, coordinator, children, shard)) for shard in range(len(children))
    ]
    watches.append(asyncio.create_task(_recovery_failure(coordinator)))
    try:
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for watch in watches:
            watch.cancel()
    return next(watch for watch in watches if watch in done).result()


async def _restart_shard(
    options: EmbeddedOptions, coordinator: Coordinator, children: list[asyncio.subprocess.Process], index: int
) -> str:
    loop = asyncio.get_running_loop()
    ends: list[float] = []
    while True:
        how = _how(await children[index].wait())
        shard = coordinator.cluster.shards.shards[index]
        ends = [when for when in ends if when > loop.time() - _RESTARTS_WITHIN_SEC] + [loop.time()]
        problem = coordinator.recoveries.problem()
        if len(ends) > _MOST_RESTARTS:
            problem = f"it has ended {len(ends)} times within {_RESTARTS_WITHIN_SEC:.0f} s"
        if problem or shard.data is None:
            return (
                f"shard {index} ended {how}; its rows are lost, so the cluster was stopped; start a new one, and "
                f"restore "
                "a checkpoint" + (f" ({problem})" if problem else "")
            )
        source = "the newest checkpoint" if not coordinator.cluster.awaits_restore else "the checkpoint being restored"
        log.warning("shard %d ended %s; it is restarted with the rows of %s", index, how, source)
        coordinator.cluster.shards.leave(index, shard.instance)
        children[index] = await _start_shard(options, coordinator.address, index, shard.data[1])


async def _recovery_failure(coordinator: Coordinator) -> str:
    while not coordinator.recoveries.failure:
        await asyncio.sleep(_FAILURE_POLL_SEC)
    return f"{coordinator.recoveries.failure}; the cluster was stopped; start a new one, and restore a checkpoint"


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


@contextlib.asynccontextmanager
async def _children(options: EmbeddedOptions, coordinator: str) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Starts one process per shard for the duration of the block; at its end they drain, and
    are killed if that fails.
    """
    children: list[asyncio.subprocess.Process] = []
    try:
        for index in range(options.cluster.shards):
            children.append(await _start_shard(options, coordinator, index, port=0))
        yield children
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
        await asyncio.gather(*(_await_end(child) for child in children))


async def _start_shard(options: EmbeddedOptions, coordinator: str, index: int, port: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *_shard_command(options, coordinator, index, port),
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # this process handles Ctrl-C, and stops the shards in order
    )


async def _await_end(child: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(child.wait(), _KILL_AFTER_SEC)
    except TimeoutError:
        child.kill()
        await child.wait()


def _shard_command(options: EmbeddedOptions, coordinator: str, index: int, port: int) -> list[str]:
    command = [
        sys.executable,
        "-m",
        f"{__package__.rpartition('.')[0]}.cli",
        *security_arguments(),
        "ps",
        f"--coordinator={coordinator}",
        f"--shard={index}",
        f"--host={options.host}",
        f"--port={port}",
        f"--cluster-json={options.cluster.handed_down()}",
        f"--drain={_DRAIN_SEC}s",
        f"--log-format={options.log.format}",
        f"--log-level={options.log.level}",
        f"--die-with-parent={os.getpid()}",
    ]
    if options.metrics_port is not None:
        command.append(f"--metrics-port={options.metrics_port + 1 + index if options.metrics_port else 0}")
    if options.advertise is not None or is_wildcard(options.host):
        command.append(f"--advertise={parse_address(coordinator)[0]}")
    if options.insecure:
        command.append("--insecure")
    return command
