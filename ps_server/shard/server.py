"""The composition root of a parameter server: a place from the coordinator, an engine, a service, a lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ...proto import control_pb2_grpc as pb_grpc
from ...proto.coordinators import Addresses
from ...proto.errors import SparserowError, Unavailable
from ...proto.security.fresh_security import fresh_security
from ..process.advertise import advertised
from ..process.control_server import ControlServer
from ..process.listen import check_host, check_port_free
from ..process.metrics import serve_metrics
from ..process.stopping import StopRequest
from .changes import ChangesService, add_changes
from .coordinator_link import CoordinatorLink
from .engine import EngineOptions, ShardEngine
from .metrics import ShardMetrics
from .request_reporter import RequestReporter
from .service import ShardService

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

SERVICE = "sparserow.v1.Shard"
CHANGES_SERVICE = "sparserow.v1.Changes"
T = TypeVar("T")
_STOP_GRACE_SEC = 2.0
_IDLE_LOOK_SEC = 5.0


@dataclass(frozen=True)
class ShardOptions:
    """How a parameter server is run.

    Args:
        coordinator: ``HOST:PORT``; of several of which one leads, all of them with commas.
        engine: of its rows and data plane; its host is the control plane's too.
        control_port: of its Shard service; 0 lets the system choose.
        advertise: ``HOST[:PORT]`` that others are told, PORT of the data plane; None: ps_server/process/advertise.py.
        insecure: accept an address that other machines can reach.
        metrics_port: of the Prometheus page on the same host; None is off.
        health_port: of health alone, without TLS, on the same host; None is off.
        drain_sec: how long requests under way may take once the process is asked to stop.
        tracer: takes the spans of requests that belong to a trace; None: there are none.
    """

    coordinator: str
    engine: EngineOptions
    control_port: int = 0
    advertise: str | None = None
    insecure: bool = False
    metrics_port: int | None = None
    health_port: int | None = None
    drain_sec: float = 10.0
    tracer: Tracer | None = None


async def serve_shard(options: ShardOptions, stop: StopRequest) -> None:
    """Serves a shard until it is asked to stop, then drains and leaves.

    Raises:
        SparserowError: it cannot start, or the coordinator refuses this process for good.
    """
    Addresses(options.coordinator, what="--coordinator")  # refuses what is none
    host, index = options.engine.host, options.engine.shard
    check_host(host, insecure=options.insecure)
    told = advertised(options.advertise, host, options.coordinator)
    check_port_free(host, options.engine.port)
    async with contextlib.AsyncExitStack() as stack:
        engines: list[ShardEngine] = []  # one, once the coordinator has said how it must be made

        def engine_of() -> ShardEngine:
            if not engines:
                raise Unavailable(f"shard {index} is starting")
            return engines[0]

        drained = asyncio.Event()

        async def drain(deadline_ms: int) -> None:
            stop.ask("the coordinator")
            await asyncio.wait_for(drained.wait(), deadline_ms / 1000 + 1)

        service = ShardService(engine_of, drain)
        changes = ChangesService(engine_of)

        def add_services(grpc_server: object) -> None:
            pb_grpc.add_ShardServicer_to_server(service, grpc_server)
            add_changes(changes, grpc_server)

        server = ControlServer(
            SERVICE,
            add_services,
            host=host,
            port=options.control_port,
            beside=(CHANGES_SERVICE,),
            health_port=options.health_port,
        )
        await server.start()
        stack.push_async_callback(server.stop, _STOP_GRACE_SEC)
        link = CoordinatorLink(options.coordinator, index, (told.host, server.port))
        stack.push_async_callback(link.close)
        place = await _until_stopped(link.register(), stop)
        if place is None:
            return
        engine = ShardEngine(options.engine, place)
        stack.callback(engine.stop)
        engines.append(engine)
        link.lost = engine.lost_commits
        link.serve_at(told.host, told.port or engine.port)
        stack.callback(RequestReporter(engine.server, index, options.tracer).stop)
        stack.enter_context(serve_metrics(ShardMetrics(engine, index), host=host, port=options.metrics_port))
        await stack.enter_async_context(fresh_security(engine.set_security))
        await server.set_serving(True)
        log.info("rows are served at %s", told.address(engine.port))
        closing = asyncio.get_running_loop().create_task(_close_idle_cursors(engine))
        try:
            await _until_stopped(link.keep_beating(), stop)
        finally:
            closing.cancel()
        await server.set_serving(False)
        await _drain(engine, link, options.drain_sec)
        drained.set()


async def _close_idle_cursors(engine: ShardEngine) -> None:
    """Followers that went away hold nothing back for ever."""
    while True:
        await asyncio.sleep(_IDLE_LOOK_SEC)
        await asyncio.to_thread(engine.store.close_idle_cursors)


async def _until_stopped(work: Coroutine[Any, Any, T], stop: StopRequest) -> T | None:
    """The result of ``work``; None when the process is asked to stop before it is there, which cancels it."""
    loop = asyncio.get_running_loop()
    working = loop.create_task(work)
    stopping = loop.create_task(stop.wait())
    done, rest = await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    if working in done:
        return working.result()
    log.info("stopping on %s", stop.reason)
    return None


async def _drain(engine: ShardEngine, link: CoordinatorLink, drain_sec: float) -> None:
    """Finishes what is under way and leaves; the coordinator's absence does not keep the process."""
    link.drain()
    with contextlib.suppress(SparserowError):
        await link.beat()
    await asyncio.to_thread(engine.drain, int(drain_sec * 1000))
    try:
        await link.beat(leaving=True)
    except SparserowError as error:
        log.info("left without a word to the coordinator: %s", error)
