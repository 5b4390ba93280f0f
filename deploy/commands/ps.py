"""``sparserow ps``: runs one parameter server."""

from __future__ import annotations

from typing import Annotated

import typer

from ...proto.config.cluster_config import ClusterConfig
from ...proto.config.listen_config import ListenConfig
from ...proto.config.log_config import LogConfig
from . import options
from .model_options import Fields, takes


@takes(
    cluster=Fields(ClusterConfig, options.OF_A_SHARD, off={"sweep_every": "never"}, is_handed_down=True),
    listen=Fields(ListenConfig),
    log=Fields(LogConfig, prefix="log"),
)
def ps(
    *,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")],
    shard: Annotated[int, typer.Option(help="Index of the shard to serve, from 0.")],
    listen: ListenConfig,
    port: Annotated[int, typer.Option(help="Port of the data plane; 0: any free one.")] = 0,
    control_port: Annotated[int, typer.Option(help="Port of the control plane; 0: any free one.")] = 0,
    cluster: ClusterConfig,
    drain: Annotated[
        str, typer.Option(help="How long requests under way may take after SIGTERM, such as 10s.")
    ] = "10s",
    observe: Annotated[
        bool, typer.Option(help="Time requests and sample their keys, for metrics and `sparserow status`.")
    ] = True,
    log: LogConfig,
    cluster_json: options.ClusterJson = None,
    die_with_parent: options.DieWithParent = 0,
) -> None:
    """Run a parameter server until SIGTERM or Ctrl-C; it then finishes the requests under way and leaves."""
    del die_with_parent, cluster_json  # a callback and the section have acted on them
    from ...proto.options.document import validate
    from ...proto.options.units import parse_seconds
    from ...proto.process.event_loop import run_server
    from ...proto.process.logs import start_log
    from ...proto.process.stopping import StopRequest
    from ...proto.process.telemetry import telemetry_from_environment
    from ...ps_server.shard.engine import EngineOptions
    from ...ps_server.shard.server import ShardOptions, serve_shard

    for number in (port, control_port):
        validate(ClusterConfig, {"port": number})
    start_log(f"shard {shard}", log)
    telemetry = telemetry_from_environment("shard")
    config = ShardOptions(
        tracer=None if telemetry is None else telemetry.tracer,
        coordinator=coordinator,
        engine=EngineOptions.of_cluster(cluster, shard, listen.host, port, observe=observe),
        control_port=control_port,
        advertise=listen.advertise,
        insecure=listen.insecure,
        metrics_port=listen.metrics_port,
        health_port=listen.health_port,
        drain_sec=parse_seconds(drain),
    )

    async def run() -> None:
        await serve_shard(config, StopRequest())

    try:
        run_server(run())
    finally:
        if telemetry is not None:
            telemetry.close()
