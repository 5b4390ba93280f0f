"""The composition root of a parameter server: registration, engine, services and lease."""

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
from ...proto.process.advertise import advertised
from ...proto.process.control_server import ControlServer
from ...proto.process.listen import check_host, check_port_free
from ...proto.process.metrics import serve_metrics
from ...proto.process.stopping import StopRequest
from ...proto.security.fresh_security import fresh_security
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
_MESSAGE_BYTES = 32 << 20  # Load names each table of a checkpoint
_IDLE_LOOK_SEC = 5.0


@dataclass(frozen=True)
class ShardOptions:
    """The options of a parameter server.

    Args:
        coordinator: ``HOST:PORT``; with several coordinators the addresses of all, with commas.
        engine: the options of its rows and data plane; the control plane uses the same host.
        control_port: the port of its Shard service; 0 lets the system choose.
        advertise: ``HOST[:PORT]`` that other processes use, with the port of the data plane; None chooses it as in
            proto/process/advertise.py.
        insecure: whether an address that other machines can reach is accepted without TLS and tokens.
        metrics_port: the port of the Prometheus page on the same host; None means no page.
        health_port: the port for health checks without TLS on the same host; None means no such port.
        drain_sec: how long requests under way may take once the process is asked to stop, in seconds.
        tracer: receives the spans of requests that belong to a trace; None keeps no spans.
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
    """Serves a shard until the process is asked to stop, then drains and leaves.

    Raises:
        SparserowError: the shard cannot start, or the coordinator refuses this process for good.
    """
    Addresses(options.coordinator, what="--coordinator")  # raises when it is not an address
    host, index = options.engine.host, options.engine.shard
    check_host(host, insecure=options.insecure)
    public = advertised(options.advertise, host, options.coordinator)
    check_port_free(host, options.engine.port)
    async with contextlib.AsyncExitStack() as stack:
        engines: list[ShardEngine] = []  # has the engine once the coordinator has sent its settings

        def engine_of() -> ShardEngine:
            if not engines:
                raise Unavailable(f"shard {index} is starting; try again")
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
            message_bytes=_MESSAGE_BYTES,
            health_port=options.health_port,
        )
        await server.start()
        stack.push_async_callback(server.stop, _STOP_GRACE_SEC)
        link = CoordinatorLink(options.coordinator, index, (public.host, server.port))
        stack.push_async_callback(link.close)
        place = await _until_stopped(link.register(), stop)
        if place is None:
            return
        engine = ShardEngine(options.engine, place)
        stack.callback(engine.stop)
        engines.append(engine)
        link.lost = engine.lost_commits
        engine.sweeps.clock_difference_sec = link.clock.difference_sec
        link.serve_at(public.host, public.port or engine.port)
        stack.callback(RequestReporter(engine.server, index, options.tracer).stop)
        metrics = ShardMetrics(engine, index, lambda: link.tokens_refused)
        stack.enter_context(serve_metrics(metrics, host=host, port=options.metrics_port))
        await stack.enter_async_context(fresh_security(engine.set_security))
        await server.set_serving(True)
        log.info("rows are served at %s", public.address(engine.port))
        closing = asyncio.get_running_loop().create_task(_close_idle_cursors(engine))
        try:
            await _until_stopped(link.keep_beating(), stop)
        finally:
            closing.cancel()
        await server.set_serving(False)
        await _drain(engine, link, options.drain_sec)
        drained.set()


async def _close_idle_cursors(engine: ShardEngine) -> None:
    """Closes the cursors of followers that went away, so that they do not keep changes for ever."""
    while True:
        await asyncio.sleep(_IDLE_LOOK_SEC)
        await asyncio.to_thread(engine.store.close_idle_cursors)


async def _until_stopped(work: Coroutine[Any, Any, T], stop: StopRequest) -> T | None:
    """Returns the result of ``work``; None when the process is asked to stop first, which cancels the work."""
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
    """Finishes the requests under way and leaves; an absent coordinator does not keep the process."""
    link.drain()
    with contextlib.suppress(SparserowError):
        await link.beat()
    await asyncio.to_thread(engine.drain, int(drain_sec * 1000))
    try:
        await link.beat(leaving=True)
    except SparserowError as error:
        log.info("the coordinator could not be informed that this shard leaves: %s", error)
