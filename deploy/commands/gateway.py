"""``sparserow gateway``: serves rows of a training cluster to programs in any language."""

from __future__ import annotations

import asyncio
import secrets
import socket

from pydantic import Field

from ...proto.config.listen_config import ListenConfig
from ...proto.config.log_config import LogConfig
from ...proto.options.strict_model import Seconds, StrictModel
from . import options
from .model_options import Fields, takes


class GatewayConfig(StrictModel):
    """The options of a gateway."""

    coordinator: str = Field(options.DEFAULT_ADDRESS, description="HOST:PORT of the training cluster.")
    port: int = Field(7200, ge=0, le=65535, description="Port of gRPC; 0: any free one.")
    name: str | None = Field(
        None, description="Name of this gateway in the cluster, which its jobs have; null: HOSTNAME-PORT."
    )
    namespaces: int = Field(
        64, ge=1, le=65536, description="Number of namespaces that it serves at once; idle ones are left first."
    )
    idle: Seconds = Field(600.0, gt=0, description="Time without a request after which it leaves a namespace.")


@takes(
    config=Fields(GatewayConfig),
    listen=Fields(ListenConfig, ("host", "insecure", "metrics_port")),
    log=Fields(LogConfig, prefix="log"),
)
def gateway(*, config: GatewayConfig, listen: ListenConfig, log: LogConfig) -> None:
    """Serve Pull and Push of a training cluster's rows over gRPC until SIGTERM or Ctrl-C."""
    from ...proto import rows_pb2_grpc as pb_grpc
    from ...proto.control import ControlClient
    from ...proto.process.access import check_certificate
    from ...proto.process.control_server import ROWS_MESSAGE_BYTES, ControlServer
    from ...proto.process.event_loop import run_server
    from ...proto.process.listen import check_host, check_port_free
    from ...proto.process.logs import start_log
    from ...proto.process.metrics import serve_metrics
    from ...proto.process.stopping import StopRequest
    from ...proto.security.fresh_security import fresh_security
    from ...worker.gateway.gateway import Gateway

    host, port, coordinator = listen.host, config.port, config.coordinator
    check_port_free(host, port, option="--port")
    check_host(host, insecure=listen.insecure)
    start_log("gateway", log)
    with ControlClient(coordinator) as control:
        control.cluster()  # raises now when the address is wrong

    async def run() -> None:
        stop = StopRequest()
        of_process = f"{socket.gethostname()}-{port or secrets.token_hex(4)}"
        service = Gateway(coordinator, config.name or of_process, namespaces=config.namespaces, idle_sec=config.idle)
        with serve_metrics(service.metrics, host=host, port=listen.metrics_port):
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
            await asyncio.sleep(max(0.1, min(5.0, config.idle / 4)))
            await asyncio.to_thread(service.leave_idle)

    run_server(run())
