"""``sparserow gateway``: serves rows of a training cluster to programs in any language."""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Annotated

import typer
from pydantic import Field

from ...proto.config.config import Seconds, StrictModel
from . import options

DEFAULT_PORT = 7200


class _Times(StrictModel):
    idle: Seconds = Field(600.0, gt=0, description="Time after which a gateway leaves a namespace.")


def gateway(
    *,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the training cluster.")] = options.DEFAULT_ADDRESS,
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of gRPC; 0: any free one.")] = DEFAULT_PORT,
    insecure: options.Insecure = False,
    name: Annotated[
        str | None,
        typer.Option(help="Name of this gateway in the cluster, which its jobs have. Default: HOSTNAME-PORT."),
    ] = None,
    namespaces: Annotated[
        int, typer.Option(help="Number of namespaces that it serves at once; idle ones are left first.")
    ] = 64,
    idle: Annotated[str, typer.Option(help="Time without a request after which it leaves a namespace.")] = "10min",
    metrics_port: options.MetricsPort = None,
    log_format: options.LogFormat = "plain",
    log_level: options.LogLevel = "info",
) -> None:
    """Serve Pull and Push of a training cluster's rows over gRPC until SIGTERM or Ctrl-C."""
    from ...proto import rows_pb2_grpc as pb_grpc
    from ...proto.config.config import LogConfig, validate
    from ...proto.control import ControlClient
    from ...proto.errors import not_allowed
    from ...proto.process.access import check_certificate
    from ...proto.process.control_server import ROWS_MESSAGE_BYTES, ControlServer
    from ...proto.process.event_loop import run_server
    from ...proto.process.listen import check_host, check_port_free
    from ...proto.process.logs import start_log
    from ...proto.process.metrics import serve_metrics
    from ...proto.process.stopping import StopRequest
    from ...proto.security.fresh_security import fresh_security
    from ...worker.gateway.gateway import Gateway

    idle_sec = validate(_Times, {"idle": idle}).idle
    if not 0 <= port <= 65535:
        raise not_allowed("--port", port, "[0, 65535]")
    check_port_free(host, port, option="--port")
    check_host(host, insecure=insecure)
    start_log("gateway", validate(LogConfig, {"format": log_format, "level": log_level}))
    with ControlClient(coordinator) as control:
        control.cluster()  # raises now when the address is wrong

    async def run() -> None:
        stop = StopRequest()
        of_process = f"{socket.gethostname()}-{port or secrets.token_hex(4)}"
        service = Gateway(coordinator, name or of_process, namespaces=namespaces, idle_sec=idle_sec)
        with serve_metrics(service.metrics, host=host, port=metrics_port):
            await serve(service, stop)

    async def serve(service: Gateway, stop: StopRequest) -> None:
        server = ControlServer(
            "sparserow.v1.Rows",
            lambda grpc_server: pb_grpc.add_RowsServicer_to_server(service, grpc_server),
            host=host,
            port=port,
            message_bytes=ROWS_MESSAGE_BYTES,
        )
        await server.start()
        await server.set_serving(True)
        leaving = asyncio.create_task(leave_idle(service))
        print(f"sparserow: gateway ready at gRPC {server.host}:{server.port}", flush=True)
        try:
            async with fresh_security(check_certificate):
                await stop.wait()
        finally:
            leaving.cancel()
            await server.stop(5.0)
            await service.close()

    async def leave_idle(service: Gateway) -> None:
        while True:
            await asyncio.sleep(max(0.1, min(5.0, idle_sec / 4)))
            await asyncio.to_thread(service.leave_idle)

    run_server(run())
