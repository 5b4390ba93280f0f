"""``sparserow coordinator``: runs the control plane of a cluster whose shards run elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from ...proto.config.cluster_config import ClusterConfig
from ...proto.config.listen_config import ListenConfig
from ...proto.config.log_config import LogConfig
from . import options
from .model_options import Fields, takes


@takes(
    cluster=Fields(
        ClusterConfig,
        ("shards", "slot_count", "worker_lease", "shard_lease", "checkpoint_roots"),
        renamed={"checkpoint_roots": "checkpoint_root"},
        changed={"checkpoint_roots": options.absolute_roots},
        required=("shards",),
        is_handed_down=True,
    ),
    at=Fields(ClusterConfig, ("port",), defaults={"port": options.DEFAULT_PORT}),
    listen=Fields(ListenConfig),
    log=Fields(LogConfig, prefix="log"),
)
def coordinator(
    *,
    cluster: ClusterConfig,
    listen: ListenConfig,
    at: ClusterConfig,
    state: Annotated[
        str | None,
        typer.Option(
            help="Where ids, route and epochs are kept over a restart: a file, or etcd://HOST:PORT[,HOST:PORT]/PREFIX "
            "(etcds: with TLS) for several coordinators of which one leads. Default: in memory alone."
        ),
    ] = None,
    job_memory: Annotated[
        str,
        typer.Option(
            help="How long the coordinator remembers the worker ids of a job that has ended, such as 1h; at most "
            "1,024 such jobs with 8,192 ranks."
        ),
    ] = "1h",
    page_port: options.PagePort = None,
    log: LogConfig,
    cluster_json: options.ClusterJson = None,
    die_with_parent: options.DieWithParent = 0,
) -> None:
    """Run a coordinator until SIGTERM or Ctrl-C: table registry, slot map, leases and membership."""
    del die_with_parent, cluster_json  # a callback and the section have acted on them
    from ...proto.errors import InvalidArgument
    from ...proto.options.units import parse_seconds
    from ...proto.process.event_loop import run_server
    from ...proto.process.listen import is_loopback
    from ...proto.process.logs import start_log
    from ...proto.process.stopping import StopRequest
    from ...ps_server.coordinator.leader_election import run_elected
    from ...ps_server.coordinator.server import CoordinatorOptions, run_coordinator
    from ...ps_server.coordinator.state.cluster import ClusterOptions
    from ...ps_server.coordinator.storage.etcd import EtcdAddress

    try:
        job_memory_sec = parse_seconds(job_memory)
    except InvalidArgument as error:
        raise InvalidArgument(f"--job-memory: {error}") from None

    start_log("coordinator", log)

    etcd = EtcdAddress(state) if state is not None and "://" in state else None

    async def run() -> None:
        stop = StopRequest()
        config = CoordinatorOptions(
            cluster=ClusterOptions.of_config(
                cluster, is_loopback=is_loopback(listen.host), job_memory_sec=job_memory_sec
            ),
            host=listen.host,
            port=at.port,
            advertise=listen.advertise,
            insecure=listen.insecure,
            state=Path(state) if state is not None and etcd is None else None,
            etcd=etcd,
            metrics_port=listen.metrics_port,
            health_port=listen.health_port,
            page_port=page_port,
        )
        if etcd is not None:
            async with run_elected(config) as elected:
                print(f"sparserow: coordinator at {elected.address}, one of those at {etcd.url}", flush=True)
                _print_page(elected.page)
                stopping = asyncio.create_task(stop.wait())
                await asyncio.wait((stopping, elected.failure), return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if elected.failure.done():
                    elected.failure.result()
            return
        async with run_coordinator(config) as running:
            print(f"sparserow: coordinator at {running.address}, waiting for {cluster.shards} shards", flush=True)
            _print_page(running.page)
            await stop.wait()

    run_server(run())


def _print_page(url: str) -> None:
    if url:
        print(f"sparserow: page at {url}", flush=True)
