"""The composition root of a coordinator: it builds state, service, gRPC server, lease watch and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...proto import control_pb2 as pb, control_pb2_grpc as pb_grpc
from ...proto.errors import SparserowError
from ...proto.process.access import check_certificate
from ...proto.process.advertise import Advertised, advertised
from ...proto.process.control_server import ControlServer
from ...proto.process.listen import check_host
from ...proto.process.metrics import serve_metrics
from ...proto.security.fresh_security import fresh_security
from .metrics import CoordinatorMetrics
from .page.server import serve_page
from .procedures.shard_calls import ShardCalls
from .procedures.shard_recovery import ShardRecoveries
from .service import CoordinatorService
from .state.cluster import Cluster, ClusterOptions
from .storage.etcd import EtcdAddress
from .storage.state_file import StateFile

log = logging.getLogger(__name__)

SERVICE = "sparserow.v1.Coordinator"
_STOP_GRACE_SEC = 2.0
_LEASE_CHECKS = 20  # number of checks in the duration of a lease


@dataclass(frozen=True)
class CoordinatorOptions:
    """The options of a coordinator process.

    Args:
        cluster: the options of the cluster that it coordinates.
        host, port: the address of the control plane; port 0 lets the system choose.
        advertise: ``HOST[:PORT]`` that other processes use; None chooses it as in proto/process/advertise.py.
        insecure: whether an address that other machines can reach is accepted without TLS and tokens.
        state: the file that keeps the state over a restart; None keeps it in memory, or in ``etcd``.
        etcd: the store that keeps the state of several coordinators, of which one leads (leader_election.py).
        metrics_port: the port of the Prometheus page on the same host; None means no page.
        health_port: the port for health checks without TLS on the same host; None means no such port.
        page_port: the port of the page for browsers on the same host; 0 lets the system choose, None means no page.
    """

    cluster: ClusterOptions
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    insecure: bool = False
    state: Path | None = None
    etcd: EtcdAddress | None = None
    metrics_port: int | None = None
    health_port: int | None = None
    page_port: int | None = None


class Coordinator:
    """A running coordinator.

    Attributes:
        cluster: the state of the cluster.
        recoveries: the recoveries of single shards.
        page: the URL of the page for browsers; empty where none is served.
    """

    def __init__(
        self, cluster: Cluster, server: ControlServer, recoveries: ShardRecoveries, public: Advertised, page: str
    ) -> None:
        self.cluster = cluster
        self.recoveries = recoveries
        self.page = page
        self._server = server
        self._public = public

    @property
    def address(self) -> str:
        """The address ``HOST:PORT`` of the control plane, under which other processes reach it."""
        return self._public.address(self._server.port)


@contextlib.asynccontextmanager
async def run_coordinator(options: CoordinatorOptions) -> AsyncIterator[Coordinator]:
    """Runs a coordinator for the duration of the block.

    Raises:
        SparserowError: the address, the state file or an option is not allowed.
    """
    check_host(options.host, insecure=options.insecure)
    public = advertised(options.advertise, options.host, None)
    async with contextlib.AsyncExitStack() as stack:
        state = StateFile(options.state) if options.state is not None else None
        if state is not None:
            stack.callback(state.close)
        cluster = load_or_create(options, state.load() if state is not None else None)

        def save() -> None:
            if state is not None:
                state.save(cluster.to_document())

        service = await stack.enter_async_context(coordinating(cluster, save))
        server = ControlServer(
            SERVICE,
            lambda grpc_server: pb_grpc.add_CoordinatorServicer_to_server(service, grpc_server),
            host=options.host,
            port=options.port,
            health_port=options.health_port,
        )
        stack.enter_context(serve_metrics(CoordinatorMetrics(cluster), host=options.host, port=options.metrics_port))
        await server.start()
        stack.push_async_callback(server.stop, _STOP_GRACE_SEC)
        await stack.enter_async_context(fresh_security(check_certificate))
        page = await stack.enter_async_context(page_of(options, service.whole_status, public, server.port))
        await server.set_serving(True)
        coordinator = Coordinator(cluster, server, service.recoveries, public, page)
        log.info("coordinator of cluster %x listens on %s", cluster.cluster_id, coordinator.address)
        yield coordinator


def page_of(
    options: CoordinatorOptions, read: Callable[[], Awaitable[pb.GetStatusReply]], public: Advertised, port: int
) -> contextlib.AbstractAsyncContextManager[str]:
    """Returns the server of the page, which yields its URL; empty where the options ask for none.

    Args:
        options: the options of the coordinator.
        read: returns the status of all namespaces.
        public, port: the address under which others reach the control plane.
    """
    return serve_page(
        read,
        shards=options.cluster.shards,
        host=options.host,
        port=options.page_port,
        public=public,
        coordinator=public.address(port),
    )


@contextlib.asynccontextmanager
async def coordinating(
    cluster: Cluster, save: Callable[[], None], written: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[CoordinatorService]:
    """Yields the service of a cluster, which is not served yet, and watches its leases for the duration of the block.

    Args:
        cluster: the state of the cluster.
        save: saves the state, or begins to save it when ``written`` is given.
        written: returns when the state is saved; None when ``save`` has saved it on return.
    """
    async with contextlib.AsyncExitStack() as stack:
        save()
        shard_calls = ShardCalls(cluster, written)
        stack.push_async_callback(shard_calls.close)
        service = CoordinatorService(cluster, shard_calls, save=save)
        stack.push_async_callback(service.close)
        service.go_on()
        leases = asyncio.get_running_loop().create_task(_watch_leases(service, cluster))
        stack.push_async_callback(_end, leases)
        yield service


def load_or_create(options: CoordinatorOptions, document: Any) -> Cluster:
    """Returns the cluster of a saved document, or a new one when there is none.

    Raises:
        SparserowError: the document is damaged, or belongs to a cluster with other options.
    """
    if document is None:
        return Cluster.create(options.cluster)
    try:
        return Cluster.from_document(document, options.cluster, now=time.monotonic())
    except SparserowError as error:
        where = options.state if options.etcd is None else options.etcd.url
        raise type(error)(f"--state {where}: {error}") from None


async def _watch_leases(service: CoordinatorService, cluster: Cluster) -> None:
    lease = min(cluster.jobs.lease_sec, cluster.shards.lease_sec)
    pause = min(1.0, lease / _LEASE_CHECKS)
    while True:
        began = time.monotonic()
        await asyncio.sleep(pause)
        late = time.monotonic() - began - pause
        try:
            service.expire_leases(late if late > lease / 4 else 0.0)
        except Exception:  # a bug must not end it in silence: workers would wait for those that are gone
            log.exception("leases")


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
