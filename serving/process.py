"""The composition root of a serving process, which joins registry, stores, data plane, gRPC, HTTP and live sync."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

import numpy as np

from ..cpp_ext import _server
from ..proto import serving_pb2_grpc as pb_grpc
from ..proto.control import ControlClient
from ..proto.errors import InvalidArgument, NotFound
from ..proto.names import is_file_table
from ..proto.process.advertise import Advertised
from ..proto.process.control_server import ROWS_MESSAGE_BYTES, ControlServer
from ..proto.process.metrics import serve_metrics
from ..proto.process.stopping import StopRequest
from ..proto.published.model_names import parse_model
from ..proto.published.registry import ModelRegistry
from ..proto.security.fresh_security import fresh_security
from ..proto.security.security import process_security
from .client.shard_assignment import ShardAssignment
from .follow_options import FollowOptions, ThresholdOptions
from .http_front import HttpFront
from .loaded_version import LoadedVersion, ServedTable, with_tables
from .lookup import LocalLookup
from .metrics import ServingMetrics
from .peers import Peers
from .row_memory import RowMemory
from .serve_config import ServeConfig
from .service import Address, ServingService
from .versions import ModelsOptions, ServedModels

log = logging.getLogger(__name__)

SERVICE = "sparserow.v1.Serving"
_DRAIN_MS = 5_000
_STOP_GRACE_SEC = 2.0


def place_of(config: ServeConfig) -> ShardAssignment:
    """Returns the shard and replica of a process.

    Raises:
        InvalidArgument: they are not allowed.
    """
    return ShardAssignment.parse(config.shard, config.replica)


def memory_of(config: ServeConfig) -> RowMemory:
    """Returns the storage for the rows of each version.

    Raises:
        InvalidArgument, FailedPrecondition: it is not possible.
    """
    return RowMemory(config.memory_budget or 0, config.ssd_path, config.ssd_engine, config.ssd_direct_io)


async def serve(
    config: ServeConfig,
    public: Advertised,
    stop: StopRequest,
    on_ready: Callable[[ServedModels, ControlServer, Address, int | None], None],
) -> None:
    """Runs a serving process until it is asked to stop.

    Args:
        config: the options of the process.
        public: the address of the data plane that clients dial.
        stop: the request to end.
        on_ready: called once, when all wanted models are complete and the peers, if any, were found. Its arguments are
            the models, the gRPC server, the address of the data plane, and the port of HTTP or None.

    Raises:
        SparserowError: the process cannot start: a port is taken, or a model to serve does not exist.
    """
    place, memory = place_of(config), memory_of(config)
    registry = ModelRegistry(config.root) if config.root is not None else None
    wanted = tuple(parse_model(model) for model in config.model)
    slot_count = await asyncio.to_thread(_slot_count, registry, wanted, config)
    async with contextlib.AsyncExitStack() as stack:
        server = _server.Server(
            _server.Store(slot_count=slot_count),
            host=config.host,
            port=config.data_port,
            io_threads=config.io_threads,
            shard_index=place.shard,
            local=True,
            **process_security().native_server(),
        )
        stack.callback(server.stop)
        await stack.enter_async_context(fresh_security(lambda security: security.give_to(server)))
        server.set_route(place.route_epoch, place.owners(slot_count))
        address = Address(public.host, public.port or server.port)
        peers = None
        if config.peers:
            peers = Peers(config.peers)
            stack.callback(peers.close)
        models = ServedModels(
            registry,
            server,
            _models_options(config, place, memory, wanted, server.port),
            lambda name: _live(name, config, place, memory),
            lambda: "" if peers is None else peers.problem,
        )
        stack.callback(models.close)
        stack.enter_context(serve_metrics(ServingMetrics(models, server), host=config.host, port=config.metrics_port))
        lookup = LocalLookup(models, place, peers)
        service = ServingService(models, lookup, place, address)
        control = ControlServer(
            SERVICE,
            lambda grpc_server: pb_grpc.add_ServingServicer_to_server(service, grpc_server),
            host=config.host,
            port=config.port,
            message_bytes=ROWS_MESSAGE_BYTES,
            health_port=config.health_port,
        )
        await control.start()
        stack.push_async_callback(control.stop, _STOP_GRACE_SEC)
        http_port = None
        if config.http_port is not None:
            from ..proto.process.http_server import HttpServer  # a process without HTTP does not load aiohttp

            limits = process_security().limits
            http = HttpServer(
                config.host,
                config.http_port,
                HttpFront(lookup, models, limits.http).answer,
                limits.http,
                client_connections=limits.client_connections,
            )
            await http.start()
            stack.push_async_callback(http.close)
            http_port = http.port
        refreshing = asyncio.get_running_loop().create_task(
            _keep_fresh(models, control, config.poll_sec, lambda: on_ready(models, control, address, http_port))
        )
        try:
            await _until_stopped(stop, refreshing)
        finally:
            refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await refreshing
        await control.set_serving(False)
        await asyncio.to_thread(server.drain, _DRAIN_MS)


async def _until_stopped(stop: StopRequest, refreshing: asyncio.Task[None]) -> None:
    stopping = asyncio.get_running_loop().create_task(stop.wait())
    done, _ = await asyncio.wait((stopping, refreshing), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if refreshing in done:
        refreshing.result()


async def _keep_fresh(
    models: ServedModels, control: ControlServer, poll_sec: float, on_first_ready: Callable[[], None]
) -> None:
    """Refreshes the models periodically, and sets the health to whether they are complete and the peers were found."""
    said = False
    while True:
        await asyncio.to_thread(models.refresh)
        await control.set_serving(models.is_ready)
        if models.is_ready and not said:
            said = True
            on_first_ready()
        await asyncio.sleep(poll_sec)


def _models_options(
    config: ServeConfig,
    place: ShardAssignment,
    memory: RowMemory,
    wanted: tuple[tuple[str, str], ...],
    data_port: int,
) -> ModelsOptions:
    follow = None
    if config.follow is not None:
        # Each follower needs a cursor of its own, also replicas that are started alike, such as a Deployment's pods.
        # So the name has the host and the port. The cursor of a process that has ended expires.
        at = f"{socket.gethostname()}:{data_port}"
        name = f"serving/{place.shard}/{place.shards}.{place.replica}/{at}"
        threshold = ThresholdOptions(config.sync_after_updates, config.sync_after_move, config.longest_sec)
        follow = FollowOptions(config.follow, name, interval_sec=config.sync_interval, threshold=threshold)
    return ModelsOptions(
        wanted=wanted,
        place=place,
        follow=follow,
        memory=memory,
        poll_sec=config.poll_sec,
        grace_sec=config.grace,
    )


def _slot_count(registry: ModelRegistry | None, wanted: tuple[tuple[str, str], ...], config: ServeConfig) -> int:
    """Returns the number of slots, which all models must share, since one data plane answers for them.

    Raises:
        InvalidArgument: the models have different numbers of slots.
        NotFound, Unavailable: a model does not exist, or the cluster cannot be reached.
        FailedPrecondition: there is a verification key, and no trusted publisher signed a version as it is.
    """
    if registry is None:
        assert config.follow is not None
        with ControlClient(config.follow) as control:
            return control.cluster().slot_count
    counts = {
        f"{model}@{which}": registry.trusted_manifest(
            model, registry.resolve(model, which).version, process_security()
        ).slot_count
        for model, which in wanted
    }
    if len(set(counts.values())) != 1:
        raise InvalidArgument(f"--model: models of different slot counts need a process each; slot counts: {counts}")
    return next(iter(counts.values()))


def _live(model: str, config: ServeConfig, place: ShardAssignment, memory: RowMemory) -> LoadedVersion:
    """Makes a version without files: it has the tables of a namespace of the cluster, and no rows yet."""
    assert config.follow is not None
    assert config.namespace is not None
    with ControlClient(config.follow) as control:
        view = control.cluster()
        schemas = [each for each in control.list_tables(config.namespace) if not is_file_table(each.name)]
    if not schemas:
        raise NotFound(f"namespace {config.namespace!r} has no tables in the cluster at {config.follow}")
    tables = {schema.name: ServedTable(schema, schema.dtype) for schema in schemas}
    store = memory.make_store(view.slot_count, view.cluster_id, place, f"{model}@0")
    return LoadedVersion(
        model=model,
        version=0,
        cluster_id=view.cluster_id,
        namespace=config.namespace,
        tables=tables,
        store=with_tables(store, tables),
        slots=np.zeros(view.slot_count, np.uint64),
    )
