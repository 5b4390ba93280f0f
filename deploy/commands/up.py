"""``sparserow up``: runs a whole cluster on this machine, in the foreground."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.config.cluster_config import ClusterConfig
from ...proto.config.listen_config import ListenConfig
from . import options
from .model_options import Fields, takes

if TYPE_CHECKING:
    from ...proto.process.stopping import StopRequest
    from ..launch.single_host import EmbeddedCluster, EmbeddedOptions


@takes(
    cluster=Fields(
        ClusterConfig,
        (
            *("shards", "port", *options.OF_A_SHARD),
            *("slot_count", "worker_lease", "shard_lease", "checkpoint_roots"),
        ),
        defaults={"port": options.DEFAULT_PORT},
        renamed={"checkpoint_roots": "checkpoint_root"},
        off={"sweep_every": "never"},
        changed={"checkpoint_roots": options.absolute_roots},
        is_handed_down=True,
    ),
    listen=Fields(ListenConfig, ("host", "advertise", "insecure")),
)
def up(
    *,
    on: Annotated[
        str | None,
        typer.Option(help="Ray cluster to run on: auto, ray://HOST:PORT or HOST:PORT. Default: this machine."),
    ] = None,
    cpus_per_shard: Annotated[float, typer.Option(help="With --on: CPUs that Ray reserves for each shard.")] = 1.0,
    strategy: Annotated[
        str, typer.Option(help="With --on: how Ray places shards: SPREAD, STRICT_SPREAD or PACK.")
    ] = "SPREAD",
    serve: Annotated[
        str | None, typer.Option(help="With --on: NAME[@ALIAS|@VERSION] that serving processes serve. Default: none.")
    ] = None,
    serve_root: Annotated[
        str | None, typer.Option(help="With --serve: path or URL of published models that every node reaches.")
    ] = None,
    serve_namespace: Annotated[
        str | None, typer.Option(help="With --serve, without --serve-root: the namespace whose tables are served.")
    ] = None,
    serve_processes: Annotated[int, typer.Option(help="With --serve: the number of serving processes.")] = 1,
    cluster: ClusterConfig,
    listen: ListenConfig,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port of the coordinator's Prometheus page; the shards use the ports after it. Default: none."
        ),
    ] = None,
    page_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the page for browsers, on the same host. Default: any free one."),
    ] = None,
    log_format: Annotated[str, typer.Option(help="Form of log lines on stderr: plain or json.")] = "plain",
    log_level: Annotated[
        str | None,
        typer.Option(
            help="Lowest severity that is logged: debug, info, warning or error. Default: warning; on Ray info."
        ),
    ] = None,
    cluster_json: options.ClusterJson = None,
    parent_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Run a coordinator and its shards on this machine, or on Ray, until Ctrl-C.

    A shard that ends by itself is restored from the newest checkpoint, if there is one and no synchronous job runs.
    Otherwise the whole cluster stops with an error: start a new one and restore a checkpoint.
    """
    del cluster_json  # the section has acted on it
    from ...proto.config.log_config import LogConfig
    from ...proto.errors import InvalidArgument, SparserowError
    from ...proto.options.document import validate
    from ...proto.process.event_loop import run_server
    from ...proto.process.logs import start_log
    from ..launch.single_host import EmbeddedOptions

    parent = socket.socket(fileno=parent_fd) if parent_fd >= 0 else None
    try:
        log = validate(LogConfig, {"format": log_format, "level": log_level or ("warning" if on is None else "info")})
        if on is not None:
            if (listen.host, cluster.port, listen.advertise, metrics_port, page_port) != (
                "127.0.0.1",
                options.DEFAULT_PORT,
                None,
                None,
                None,
            ):
                raise InvalidArgument(
                    "--host, --port, --advertise, --metrics-port, --page-port: have no effect with --on; servers "
                    "listen on the address of the node that Ray chooses"
                )
            if serve is None and (serve_root, serve_namespace, serve_processes) != (None, None, 1):
                raise InvalidArgument(
                    "--serve-root, --serve-namespace, --serve-processes: have no effect without --serve"
                )
            from ..ray.cluster import RayOptions, ServingOptions
            from ..ray.foreground import run_on_ray

            serving = None if serve is None else ServingOptions(serve, serve_root, serve_namespace, serve_processes)
            run_on_ray(on, RayOptions(cluster, log, cpus_per_shard, strategy, serving, listen.insecure))  # type: ignore[arg-type]
            return
        if (cpus_per_shard, strategy, serve, serve_root, serve_namespace, serve_processes) != (
            1.0,
            "SPREAD",
            None,
            None,
            None,
            1,
        ):
            raise InvalidArgument("--cpus-per-shard, --strategy and --serve*: have no effect without --on")
        start_log("coordinator", log)
        if page_port is None and parent is None:
            page_port = 0
        given = (listen.host, listen.insecure, metrics_port, listen.advertise, page_port)
        run_server(_run(EmbeddedOptions(cluster, log, *given), parent))
    except SparserowError as error:
        if parent is None:
            raise
        _send(parent, {"error": error.number, "message": str(error)})
        raise typer.Exit(1) from None


async def _run(config: EmbeddedOptions, parent: socket.socket | None) -> None:
    from ...proto.process.stopping import StopRequest
    from ..launch.single_host import run_embedded

    stop = StopRequest()
    watch = _follow_parent(parent, stop) if parent is not None else None

    def on_ready(cluster: EmbeddedCluster) -> None:
        if parent is not None:
            shards = [[shard.index, shard.host, shard.port, shard.pid] for shard in cluster.shards]
            _send(parent, {"address": cluster.address, "shards": shards, "page": cluster.page})
            return
        for shard in cluster.shards:
            print(f"sparserow: shard {shard.index} at {shard.host}:{shard.port} (process {shard.pid})")
        print(f"sparserow: page at {cluster.page}")
        print(f"sparserow: ready at {cluster.address} (Ctrl-C stops it)", flush=True)

    try:
        await run_embedded(config, stop, on_ready)
    finally:
        if watch is not None:
            watch.cancel()
    if parent is None:
        print("sparserow: stopped", flush=True)


def _follow_parent(parent: socket.socket, stop: StopRequest) -> asyncio.Task[None]:
    """Stops when the other end of ``parent`` is closed, or the parent process has ended, because a fork may keep that
    end open.
    """
    import os

    from ...proto.process.parent import watch_parent

    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        loop.remove_reader(parent.fileno())
        stop.ask("the parent's request")

    loop.add_reader(parent.fileno(), on_readable)
    return loop.create_task(watch_parent(os.getppid(), lambda: stop.ask("the parent's end")))


def _send(parent: socket.socket, message: dict[str, object]) -> None:
    try:
        parent.sendall(json.dumps(message).encode() + b"\n")
    except OSError:  # the parent has ended, and the watch ends this process
        return
