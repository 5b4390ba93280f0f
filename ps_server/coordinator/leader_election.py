"""Runs one of several coordinators of a cluster: it serves while it leads, and otherwise names the leader."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ...proto import control_pb2 as pb, control_pb2_grpc as pb_grpc
from ...proto.errors import SparserowError
from ...proto.grpc_status import NotLeader
from ...proto.process.access import check_certificate
from ...proto.process.advertise import advertised
from ...proto.process.control_server import ControlServer
from ...proto.process.listen import check_host
from ...proto.process.metrics import serve_metrics
from ...proto.security.fresh_security import fresh_security
from .metrics import CoordinatorMetrics
from .server import SERVICE, CoordinatorOptions, coordinating, load_or_create, page_of
from .service import CoordinatorService
from .state.cluster import Cluster
from .storage.etcd import EtcdSeat
from .storage.state_writer import StateWriter

log = logging.getLogger(__name__)

_STOP_GRACE_SEC = 2.0
_SHORTEST_TTL_SEC = 2
_LOOK_SEC = 1.0
# Answers of these methods hold only for a moment, so they need not wait until the state they changed is written.
_PROMISE_NOTHING = frozenset(("WorkerHeartbeat", "GetStatus"))


class _WhileItLeads(Collector):
    """The methods and metrics of the service, which this coordinator offers only while it leads."""

    def __init__(self) -> None:
        self.seat: EtcdSeat | None = None
        self.term = 0
        self.service: CoordinatorService | None = None
        self.cluster: Cluster | None = None
        self.writer: StateWriter | None = None

    def __getattr__(self, method: str) -> Any:
        if not method[0].isupper():
            raise AttributeError(method)

        async def answer(request: Any, context: Any) -> Any:
            service, writer = self._leading(), self.writer
            before = 0 if writer is None else writer.saves
            reply = await getattr(service, method)(request, context)
            if writer is not None and writer.saves != before and method not in _PROMISE_NOTHING:
                await writer.written()
            return reply

        return answer

    def _leading(self) -> CoordinatorService:
        """Returns the service; raises NotLeader while another coordinator leads."""
        if self.seat is not None:
            self.seat.check(self.term)
        if self.service is None:
            raise NotLeader("this coordinator is starting; try again", "")
        return self.service

    async def whole_status(self) -> pb.GetStatusReply:
        """Returns the status of all namespaces; raises NotLeader while another coordinator leads."""
        return await self._leading().whole_status()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the cluster; none while another coordinator leads."""
        cluster = self.cluster
        if cluster is not None:
            yield from CoordinatorMetrics(cluster).collect()


class Elected:
    """A running coordinator, which leads or waits to lead.

    Attributes:
        address: ``HOST:PORT`` under which other processes reach it.
        page: the URL of its page for browsers; empty where none is served.
        failure: a task that ends with an error when this coordinator cannot lead, for example because the state is
            damaged.
    """

    def __init__(self, address: str, page: str, failure: asyncio.Task[None]) -> None:
        self.address = address
        self.page = page
        self.failure = failure


@contextlib.asynccontextmanager
async def run_elected(options: CoordinatorOptions) -> AsyncIterator[Elected]:
    """Runs a coordinator with ``options.etcd`` for the duration of the block.

    Raises:
        SparserowError: the address or an option is not allowed.
    """
    assert options.etcd is not None
    check_host(options.host, insecure=options.insecure)
    public = advertised(options.advertise, options.host, None)
    gate = _WhileItLeads()
    async with contextlib.AsyncExitStack() as stack:
        server = ControlServer(
            SERVICE,
            lambda grpc_server: pb_grpc.add_CoordinatorServicer_to_server(gate, grpc_server),
            host=options.host,
            port=options.port,
            health_port=options.health_port,
        )
        stack.enter_context(serve_metrics(gate, host=options.host, port=options.metrics_port))
        await server.start()
        stack.push_async_callback(server.stop, _STOP_GRACE_SEC)
        await stack.enter_async_context(fresh_security(check_certificate))
        address = public.address(server.port)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        lease = min(options.cluster.worker_lease_sec, options.cluster.shard_lease_sec)
        ttl_sec = max(_SHORTEST_TTL_SEC, round(lease / 2))

        def on_change() -> None:
            loop.call_soon_threadsafe(changed.set)

        gate.seat = EtcdSeat(options.etcd, address, ttl_sec, on_change)
        stack.push_async_callback(asyncio.to_thread, gate.seat.close)
        page = await stack.enter_async_context(page_of(options, gate.whole_status, public, server.port))
        await server.set_serving(True)
        leading = loop.create_task(_lead(options, gate, gate.seat, changed))
        stack.push_async_callback(_end, leading)
        yield Elected(address, page, leading)


async def _lead(options: CoordinatorOptions, gate: _WhileItLeads, seat: EtcdSeat, changed: asyncio.Event) -> None:
    """Serves one term after another; between terms this coordinator has no state of the cluster."""
    while True:
        await changed.wait()
        changed.clear()
        if term := seat.term:
            with contextlib.suppress(NotLeader):
                await _serve_term(options, gate, seat, term, changed)
            gate.term, gate.service, gate.cluster, gate.writer = 0, None, None, None
            log.warning("this coordinator does not lead any more")


async def _serve_term(
    options: CoordinatorOptions, gate: _WhileItLeads, seat: EtcdSeat, term: int, changed: asyncio.Event
) -> None:
    cluster = load_or_create(options, await asyncio.to_thread(seat.load, term))
    writer = StateWriter(cluster.to_document, partial(seat.save, term))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(writer.close)
        service = await stack.enter_async_context(coordinating(cluster, writer.save, writer.written))
        await writer.written()
        gate.term, gate.service, gate.cluster, gate.writer = term, service, cluster, writer
        log.warning("this coordinator leads cluster %x", cluster.cluster_id)
        while seat.term == term:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), _LOOK_SEC)
                changed.clear()
        changed.set()  # wakes the loop for the next term, which may have begun


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, SparserowError):
        await task
