"""``sparserow serve``: runs one serving process."""

from __future__ import annotations

from ...proto.config.log_config import LogConfig
from ...serving.serve_config import ServeConfig
from . import options
from .model_options import Fields, takes


@takes(config=Fields(ServeConfig, required=("model",)), log=Fields(LogConfig, prefix="log"))
def serve(*, config: ServeConfig, log: LogConfig, die_with_parent: options.DieWithParent = 0) -> None:
    """Serve published models, or a training cluster's rows, until SIGTERM or Ctrl-C."""
    del die_with_parent  # its callback has acted on it
    from ...proto.process.advertise import Advertised, advertised
    from ...proto.process.control_server import ControlServer
    from ...proto.process.event_loop import run_server
    from ...proto.process.listen import check_host, check_port_free
    from ...proto.process.logs import start_log
    from ...proto.process.stopping import StopRequest
    from ...serving.process import serve as run_serve
    from ...serving.service import Address
    from ...serving.versions import ServedModels

    check_host(config.host, insecure=config.insecure)
    public = advertised(config.advertise, config.host, config.follow)
    for option, port in (("--port", config.port), ("--data-port", config.data_port), ("--http-port", config.http_port)):
        check_port_free(config.host, port or 0, option=option)
    start_log(f"serving {config.shard}.{config.replica}", log)

    def say_ready(models: ServedModels, control: ControlServer, address: Address, http: int | None) -> None:
        named = ", ".join(f"{name}@{which}" for name, which in sorted(models.book().aliases))
        places = f"gRPC {Advertised(public.host).address(control.port)}, data plane {public.address(address.port)}"
        places += f", HTTP {Advertised(public.host).address(http)}" if http is not None else ""
        print(f"sparserow: serving {named} ready at {places}", flush=True)

    async def run() -> None:
        await run_serve(config, public, StopRequest(), say_ready)

    run_server(run())
