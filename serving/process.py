"""The composition root of a serving process, which joins registry, stores, data plane, gRPC, HTTP and live sync."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..cpp_ext import _server
from ..proto import serving_pb2_grpc as pb_grpc
from ..proto.config.units import parse_bytes, parse_seconds
from ..proto.control import ControlClient
from ..proto.coordinators import parse_address
from ..proto.errors import InvalidArgument, NotFound, not_allowed
from ..proto.names import is_file_table
from ..proto.process.control_server import ROWS_MESSAGE_BYTES, ControlServer
from ..proto.process.metrics import serve_metrics
from ..proto.process.stopping import StopRequest
from ..proto.published.model_names import parse_model
from ..proto.published.registry import ModelRegistry
from ..proto.security.fresh_security import fresh_security
from ..proto.security.security import process_security
from .client.replica_pool import split_addresses
from .client.shard_assignment import ShardAssignment
from .follow_options import NO_THRESHOLD, FollowOptions, ThresholdOptions
from .http_front import HttpFront
from .loaded_version import LoadedVersion, ServedTable, with_tables
from .lookup import LocalLookup
from .metrics import ServingMetrics
from .peers import Peers
from .row_memory import RowMemory
from .service import Address, ServingService
from .versions import ModelsOptions, ServedModels

log = logging.getLogger(__name__)

SERVICE = "sparserow.v1.Serving"
_DRAIN_MS = 5_000
_STOP_GRACE_SEC = 2.0
SYNC_INTERVAL = "100ms"  # the default of ``--sync-interval``
_POLL_SEC, _POLL_FAR_SEC = 0.5, 5.0  # of folders, and of URLs, where each look costs requests


@dataclass(frozen=True)
class ServeOptions:
    """The options of a serving process.

    Args:
        models: the models to serve, each as ``NAME[@ALIAS|@VERSION]``.
        place: the shard and replica of this process.
        root: the folder of the registry, by path or URL; None: rows come only from the cluster at ``follow``.
        follow: ``HOST:PORT`` of the training cluster's coordinator; None: no live sync.
        namespace: the namespace of the tables, when there is no root.
        peers: the gRPC addresses, ``HOST:PORT``, of the processes of all shards. The gRPC and HTTP fronts ask them for
            keys of other shards; (): such keys are not answered.
        host: the host on which all servers listen.
        told_host: the host of the data plane that clients are told; None: the one on which it listens.
        told_port: the port of the data plane that clients are told; 0: the one on which it listens.
        port: the port of gRPC; 0: the system chooses one.
        data_port: the port of the data plane; 0: the system chooses one.
        http_port: the port of HTTP; 0: the system chooses one; None: no HTTP.
        metrics_port: the port of the Prometheus page; None: no page.
        health_port: the port for health checks without TLS; None: no such port.
        unix_path: the path of a Unix socket of the data plane; None: no socket.
        memory: the storage for the rows of each version.
        io_threads: the number of I/O threads of the data plane.
        sync_interval_sec: the shortest pause between rounds of live sync, in seconds; several changes of a row
            meanwhile are sent once.
        sync_threshold: the threshold below which training shards keep changed rows back for a while.
        poll_sec: the pause between two checks of the aliases, in seconds.
        grace_sec: how long a version that no alias names still answers, in seconds.

    Raises:
        InvalidArgument: an option is missing, or has no effect beside the others; the text names the flag.
    """

    models: tuple[str, ...]
    place: ShardAssignment
    root: str | None = None
    follow: str | None = None
    namespace: str | None = None
    peers: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    told_host: str | None = None
    told_port: int = 0
    port: int = 0
    data_port: int = 0
    http_port: int | None = None
    metrics_port: int | None = None
    health_port: int | None = None
    unix_path: str | None = None
    memory: RowMemory = RowMemory()  # noqa: RUF009 - frozen
    io_threads: int = 2
    sync_interval_sec: float = 0.1
    sync_threshold: ThresholdOptions = NO_THRESHOLD
    poll_sec: float = _POLL_SEC
    grace_sec: float = 30.0

    @staticmethod
    def from_flags(
        *,
        model: Sequence[str],
        root: str | None = None,
        shard: str = "0/1",
        replica: int = 0,
        peers: str | None = None,
        follow: str | None = None,
        namespace: str | None = None,
        host: str = "127.0.0.1",
        told_host: str | None = None,
        told_port: int = 0,
        port: int = 0,
        data_port: int = 0,
        http_port: int | None = None,
        metrics_port: int | None = None,
        health_port: int | None = None,
        unix_path: str | None = None,
        memory_budget: str | None = None,
        ssd_path: str | None = None,
        ssd_engine: str | None = None,
        ssd_direct_io: bool = False,
        io_threads: int = 2,
        sync_interval: str = SYNC_INTERVAL,
        sync_after_updates: int = 0,
        sync_after_move: float = 0.0,
        sync_max_delay: str | None = None,
        poll: str | None = None,
        grace: str = "30s",
    ) -> ServeOptions:
        """Makes the options from flags of ``sparserow serve``; defaults are those of the flags.

        Arguments that are not listed are the flags of the same names.

        Args:
            model: the values of ``--model``.
            told_host: the host of the data plane that clients are told; None: the one on which it listens.
            told_port: the port of the data plane that clients are told; 0: the one on which it listens.

        Raises:
            InvalidArgument: a value is not allowed, or has no effect beside the others; the text names the flag.
        """
        is_far = root is not None and "://" in root and not root.startswith("file://")
        poll_sec = (_POLL_FAR_SEC if is_far else _POLL_SEC) if poll is None else parse_seconds(poll)
        if not poll_sec > 0:
            raise not_allowed("--poll", poll, "> 0")
        if sync_max_delay is not None and not (sync_after_updates or sync_after_move):
            raise InvalidArgument("--sync-max-delay has no effect without --sync-after-updates or --sync-after-move")
        if (sync_after_updates or sync_after_move) and follow is None:
            raise InvalidArgument("--sync-after-updates and --sync-after-move have no effect without --follow")
        if sync_interval != SYNC_INTERVAL and follow is None:
            raise InvalidArgument("--sync-interval has no effect without --follow")
        return ServeOptions(
            models=tuple(model),
            place=ShardAssignment.parse(shard, replica),
            root=root,
            follow=follow,
            namespace=namespace,
            peers=split_addresses(peers) if peers is not None else (),
            host=host,
            told_host=told_host,
            told_port=told_port,
            port=port,
            data_port=data_port,
            http_port=http_port,
            metrics_port=metrics_port,
            health_port=health_port,
            unix_path=unix_path,
            memory=RowMemory(
                parse_bytes(memory_budget) if memory_budget is not None else 0, ssd_path, ssd_engine, ssd_direct_io
            ),
            io_threads=io_threads,
            sync_interval_sec=parse_seconds(sync_interval),
            sync_threshold=ThresholdOptions(sync_after_updates, sync_after_move, parse_seconds(sync_max_delay or "5s")),
            poll_sec=poll_sec,
            grace_sec=parse_seconds(grace),
        )

    def __post_init__(self) -> None:
        if not self.models:
            raise InvalidArgument("--model: it is missing; allowed: NAME[@ALIAS|@VERSION]")
        if self.root is None and (self.follow is None or self.namespace is None):
            raise InvalidArgument(
                "--root: it is missing; name the folder of published models, or --follow and --namespace"
            )
        if self.root is not None and self.namespace is not None:
            raise InvalidArgument("--namespace has no effect with --root; remove one of them")
        if self.peers and self.place.shards == 1:
            raise InvalidArgument("--peers has no effect with one shard; remove it, or name --shard I/N")
        for peer in self.peers:
            parse_address(peer, what="--peers")


async def serve(
    options: ServeOptions,
    stop: StopRequest,
    on_ready: Callable[[ServedModels, ControlServer, Address, int | None], None],
) -> None:
    """Runs a serving process until it is asked to stop.

    Args:
        options: the options of the process.
        stop: the request to end.
        on_ready: called once, when all wanted models are complete and the peers, if any, were found. Its arguments are
            the models, the gRPC server, the address of the data plane, and the port of HTTP or None.

    Raises:
        SparserowError: the process cannot start: a port is taken, or a model to serve does not exist.
    """
    registry = ModelRegistry(options.root) if options.root is not None else None
    wanted = tuple(parse_model(model) for model in options.models)
    slot_count = await asyncio.to_thread(_slot_count, registry, wanted, options)
    async with contextlib.AsyncExitStack() as stack:
        server = _server.Server(
            _server.Store(slot_count=slot_count),
            host=options.host,
            port=options.data_port,
            io_threads=options.io_threads,
            shard_index=options.place.shard,
            unix_path=options.unix_path or "",
            **process_security().native_server(),
        )
        stack.callback(server.stop)
        await stack.enter_async_context(fresh_security(lambda security: security.give_to(server)))
        server.set_route(options.place.route_epoch, options.place.owners(slot_count))
        address = Address(options.told_host or options.host, options.told_port or server.port, options.unix_path or "")
        peers = None
        if options.peers:
            peers = Peers(options.peers)
            stack.callback(peers.close)
        models = ServedModels(
            registry,
            server,
            _models_options(options, wanted, server.port),
            lambda name: _live(name, options),
            lambda: "" if peers is None else peers.problem,
        )
        stack.callback(models.close)
        stack.enter_context(serve_metrics(ServingMetrics(models, server), host=options.host, port=options.metrics_port))
        lookup = LocalLookup(models, options.place, peers)
        service = ServingService(models, lookup, options.place, address)
        control = ControlServer(
            SERVICE,
            lambda grpc_server: pb_grpc.add_ServingServicer_to_server(service, grpc_server),
            host=options.host,
            port=options.port,
            message_bytes=ROWS_MESSAGE_BYTES,
            health_port=options.health_port,
        )
        await control.start()
        stack.push_async_callback(control.stop, _STOP_GRACE_SEC)
        http_port = None
        if options.http_port is not None:
            from ..proto.process.http_server import HttpServer  # a process without HTTP does not load aiohttp

            limits = process_security().limits
            http = HttpServer(
                options.host,
                options.http_port,
                HttpFront(lookup, models, limits.http).answer,
                limits.http,
                client_connections=limits.client_connections,
            )
            await http.start()
            stack.push_async_callback(http.close)
            http_port = http.port
        refreshing = asyncio.get_running_loop().create_task(
            _keep_fresh(models, control, options.poll_sec, lambda: on_ready(models, control, address, http_port))
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


def _models_options(options: ServeOptions, wanted: tuple[tuple[str, str], ...], data_port: int) -> ModelsOptions:
    place = options.place
    follow = None
    if options.follow is not None:
        # Each follower needs a cursor of its own, also replicas that are started alike, such as a Deployment's pods.
        # So the name has the host and the port. The cursor of a process that has ended expires.
        at = f"{socket.gethostname()}:{data_port}"
        name = f"serving/{place.shard}/{place.shards}.{place.replica}/{at}"
        follow = FollowOptions(
            options.follow, name, interval_sec=options.sync_interval_sec, threshold=options.sync_threshold
        )
    return ModelsOptions(
        wanted=wanted,
        place=place,
        follow=follow,
        memory=options.memory,
        poll_sec=options.poll_sec,
        grace_sec=options.grace_sec,
    )


def _slot_count(registry: ModelRegistry | None, wanted: tuple[tuple[str, str], ...], options: ServeOptions) -> int:
    """Returns the number of slots, which all models must share, since one data plane answers for them.

    Raises:
        InvalidArgument: the models have different numbers of slots.
        NotFound, Unavailable: a model does not exist, or the cluster cannot be reached.
        FailedPrecondition: there is a verification key, and no trusted publisher signed a version as it is.
    """
    if registry is None:
        assert options.follow is not None
        with ControlClient(options.follow) as control:
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


def _live(model: str, options: ServeOptions) -> LoadedVersion:
    """Makes a version without files: it has the tables of a namespace of the cluster, and no rows yet."""
    assert options.follow is not None
    assert options.namespace is not None
    with ControlClient(options.follow) as control:
        view = control.cluster()
        schemas = [each for each in control.list_tables(options.namespace) if not is_file_table(each.name)]
    if not schemas:
        raise NotFound(f"namespace {options.namespace!r} has no tables in the cluster at {options.follow}")
    tables = {schema.name: ServedTable(schema, schema.dtype) for schema in schemas}
    store = options.memory.make_store(view.slot_count, view.cluster_id, options.place, f"{model}@0")
    return LoadedVersion(
        model=model,
        version=0,
        cluster_id=view.cluster_id,
        namespace=options.namespace,
        tables=tables,
        store=with_tables(store, tables),
        slots=np.zeros(view.slot_count, np.uint64),
    )
