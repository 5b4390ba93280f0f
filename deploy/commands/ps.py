"""``sparserow ps``: runs one parameter server."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


def ps(
    *,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")],
    shard: Annotated[int, typer.Option(help="Index of the shard to serve, from 0.")],
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the data plane; 0: any free one.")] = 0,
    advertise: options.Advertise = None,
    control_port: Annotated[int, typer.Option(help="Port of the control plane; 0: any free one.")] = 0,
    insecure: options.Insecure = False,
    memory_budget: options.MemoryBudget = None,
    ssd_path: options.SsdPath = None,
    ssd_bytes: options.SsdBytes = None,
    ssd_engine: options.SsdEngine = None,
    ssd_direct_io: options.SsdDirectIo = False,
    sweep_every: options.SweepEvery = "60s",
    io_threads: options.IoThreads = 2,
    drain: Annotated[
        str, typer.Option(help="How long requests under way may take after SIGTERM, such as 10s.")
    ] = "10s",
    metrics_port: options.MetricsPort = None,
    health_port: options.HealthPort = None,
    observe: Annotated[
        bool, typer.Option(help="Time requests and sample their keys, for metrics and `sparserow status`.")
    ] = True,
    log_format: options.LogFormat = "plain",
    log_level: options.LogLevel = "info",
    cluster_json: options.ClusterJson = None,
    die_with_parent: options.DieWithParent = 0,
) -> None:
    """Run a parameter server until SIGTERM or Ctrl-C; it then finishes the requests under way and leaves."""
    del die_with_parent  # its callback has acted on it
    from ...proto.config.config import ClusterConfig, LogConfig, validate
    from ...proto.config.units import parse_seconds
    from ...proto.process.event_loop import run_server
    from ...proto.process.logs import start_log
    from ...proto.process.stopping import StopRequest
    from ...proto.process.telemetry import telemetry_from_environment
    from ...ps_server.shard.engine import EngineOptions
    from ...ps_server.shard.server import ShardOptions, serve_shard

    cluster = options.cluster_config(
        cluster_json,
        {
            "memory_budget": memory_budget,
            "ssd_path": ssd_path,
            "ssd_bytes": ssd_bytes,
            **({} if ssd_engine is None else {"ssd_engine": ssd_engine}),
            **({"ssd_direct_io": True} if ssd_direct_io else {}),
            "sweep_every": options.seconds_or_never(sweep_every),
            "io_threads": io_threads,
        },
    )
    for number in (port, control_port):
        validate(ClusterConfig, {"port": number})
    start_log(f"shard {shard}", validate(LogConfig, {"format": log_format, "level": log_level}))
    telemetry = telemetry_from_environment("shard")
    config = ShardOptions(
        tracer=None if telemetry is None else telemetry.tracer,
        coordinator=coordinator,
        engine=EngineOptions.of_cluster(cluster, shard, host, port, observe=observe),
        control_port=control_port,
        advertise=advertise,
        insecure=insecure,
        metrics_port=metrics_port,
        health_port=health_port,
        drain_sec=parse_seconds(drain),
    )

    async def run() -> None:
        await serve_shard(config, StopRequest())

    try:
        run_server(run())
    finally:
        if telemetry is not None:
            telemetry.close()
