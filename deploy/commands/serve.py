"""``sparserow serve``: runs one serving process."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options

DEFAULT_PORT = 7100


def serve(
    *,
    model: Annotated[
        list[str], typer.Option("--model", help="NAME[@ALIAS|@VERSION]; may be repeated. NAME alone means NAME@live.")
    ],
    root: Annotated[
        str | None,
        typer.Option(help="Path or URL of the folder of published models. Default: serve the rows of --follow."),
    ] = None,
    shard: Annotated[str, typer.Option(help="I/N: this process serves part I of N parts of the slots.")] = "0/1",
    replica: Annotated[int, typer.Option(help="Index of this process among those that serve the same shard.")] = 0,
    peers: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of the gRPC servers of the processes of all shards, with commas: gRPC and HTTP ask them "
            "for keys of other shards. Default: such keys are not answered."
        ),
    ] = None,
    follow: Annotated[
        str | None, typer.Option(help="HOST:PORT of the training cluster's coordinator. Default: no live sync.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Without --root: the namespace whose tables are served.")
    ] = None,
    host: options.Host = "127.0.0.1",
    advertise: options.Advertise = None,
    port: Annotated[int, typer.Option(help="Port of gRPC; 0: any free one.")] = DEFAULT_PORT,
    data_port: Annotated[int, typer.Option(help="Port of the data plane; 0: any free one.")] = 0,
    http_port: Annotated[int | None, typer.Option(help="Port of HTTP/JSON; 0: any free one. Default: no HTTP.")] = None,
    unix_path: Annotated[
        str | None, typer.Option(help="Path of a Unix socket of the data plane. Default: none.")
    ] = None,
    insecure: options.Insecure = False,
    memory_budget: Annotated[
        str | None, typer.Option(help="Memory for the rows of each version, such as 8GiB. Default: no budget.")
    ] = None,
    ssd_path: Annotated[
        str | None,
        typer.Option(
            help="Folder on an SSD for rows beyond --memory-budget. Default: none; a version that does not fit fails."
        ),
    ] = None,
    ssd_engine: options.SsdEngine = None,
    ssd_direct_io: options.SsdDirectIo = False,
    io_threads: Annotated[int, typer.Option(help="Number of network threads of the data plane.")] = 2,
    sync_interval: Annotated[
        str,
        typer.Option(
            help="Shortest time between rounds of live sync, such as 100ms; changes of a row within it are sent once. "
            "Rounds that take long begin up to 1s after each other."
        ),
    ] = "100ms",
    sync_after_updates: Annotated[
        int, typer.Option(help="Number of writes since a row was last sent after which live sync sends it. 0: at once.")
    ] = 0,
    sync_after_move: Annotated[
        float,
        typer.Option(help="L2 distance from the row as last sent beyond which live sync sends it. 0: at once."),
    ] = 0.0,
    sync_max_delay: Annotated[
        str | None, typer.Option(help="With either of these: the longest wait of a changed row. Default: 5s.")
    ] = None,
    poll: Annotated[
        str | None,
        typer.Option(help="Time between checks of the aliases. Default: 500ms for a folder, 5s for a URL."),
    ] = None,
    grace: Annotated[
        str, typer.Option(help="How long a version is still served after its alias has moved, such as 30s.")
    ] = "30s",
    metrics_port: options.MetricsPort = None,
    health_port: options.HealthPort = None,
    log_format: options.LogFormat = "plain",
    log_level: options.LogLevel = "info",
    die_with_parent: options.DieWithParent = 0,
) -> None:
    """Serve published models, or a training cluster's rows, until SIGTERM or Ctrl-C."""
    del die_with_parent  # its callback has acted on it
    from ...proto.config.config import LogConfig, validate
    from ...proto.errors import not_allowed
    from ...proto.process.advertise import Advertised, advertised
    from ...proto.process.control_server import ControlServer
    from ...proto.process.event_loop import run_server
    from ...proto.process.listen import check_host, check_port_free
    from ...proto.process.logs import start_log
    from ...proto.process.stopping import StopRequest
    from ...serving.process import ServeOptions, serve as run_serve
    from ...serving.service import Address
    from ...serving.versions import ServedModels

    ports = (("--port", port), ("--data-port", data_port), ("--http-port", http_port or 0))
    for name, number in ports:
        if not 0 <= number <= 65535:
            raise not_allowed(name, number, "[0, 65535]")
    check_host(host, insecure=insecure)
    told = advertised(advertise, host, follow)
    config = ServeOptions.from_flags(
        model=model,
        root=root,
        shard=shard,
        replica=replica,
        peers=peers,
        follow=follow,
        namespace=namespace,
        host=host,
        told_host=told.host,
        told_port=told.port or 0,
        port=port,
        data_port=data_port,
        http_port=http_port,
        metrics_port=metrics_port,
        health_port=health_port,
        unix_path=unix_path,
        memory_budget=memory_budget,
        ssd_path=ssd_path,
        ssd_engine=ssd_engine,
        ssd_direct_io=ssd_direct_io,
        io_threads=io_threads,
        sync_interval=sync_interval,
        sync_after_updates=sync_after_updates,
        sync_after_move=sync_after_move,
        sync_max_delay=sync_max_delay,
        poll=poll,
        grace=grace,
    )
    for name, number in ports:
        check_port_free(host, number, option=name)
    start_log(f"serving {shard}.{replica}", validate(LogConfig, {"format": log_format, "level": log_level}))

    def say_ready(models: ServedModels, control: ControlServer, address: Address, http: int | None) -> None:
        named = ", ".join(f"{name}@{which}" for name, which in sorted(models.book().aliases))
        places = f"gRPC {Advertised(told.host).address(control.port)}, data plane {told.address(address.port)}"
        places += f", {address.unix_path}" if address.unix_path else ""
        places += f", HTTP {Advertised(told.host).address(http)}" if http is not None else ""
        print(f"sparserow: serving {named} ready at {places}", flush=True)

    async def run() -> None:
        await run_serve(config, StopRequest(), say_ready)

    run_server(run())
