"""A gRPC server of the control plane: one service of Sparserow, with health and reflection beside it.

Errors of the taxonomy become gRPC statuses only in this module. Any other error is a bug, logged with its traceback and
answered as Internal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ...proto.errors import Internal, SparserowError, Unavailable, not_allowed
from ...proto.grpc_status import SERVER_OPTIONS, status_of_error
from ...proto.log_rate import RateLimit
from ...proto.request_names import check_names
from ...proto.security.security import process_security
from .access import check_call, server_credentials
from .listen import check_port_free

log = logging.getLogger(__name__)
log.addFilter(RateLimit())  # peers cause these lines


class _Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls that their token does not allow, and turns errors of the methods into statuses."""

    def __init__(self, services: Sequence[str]) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(self._prefixes):
            return handler

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                check_call(process_security(), method, request, context.invocation_metadata())
                check_names(request)
                return await handler.unary_unary(request, context)
            except asyncio.CancelledError as given_up:
                return await _abort(context, method, _unavailable(context, method, given_up))
            except Exception as error:
                return await _abort(context, method, error)

        async def answer_many(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                check_call(process_security(), method, request, context.invocation_metadata())
                check_names(request)
                async for reply in handler.unary_stream(request, context):
                    yield reply
            except asyncio.CancelledError as given_up:
                await _abort(context, method, _unavailable(context, method, given_up))
            except Exception as error:
                await _abort(context, method, error)

        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(answer_many, **coders)
        return grpc.unary_unary_rpc_method_handler(answer, **coders)


def _unavailable(
    context: grpc.aio.ServicerContext[Any, Any], method: str, given_up: asyncio.CancelledError
) -> Unavailable:
    """Returns the error of a call that awaited what somebody else cancelled, such as a coordinator that leads no more.

    gRPC answers nothing to the caller of a method that ends by cancellation.

    Raises:
        CancelledError: the caller itself has cancelled the call.
    """
    if context.cancelled():
        raise given_up
    return Unavailable(f"{method.rpartition('/')[2]} was given up by the server; ask again")


async def _abort(context: grpc.aio.ServicerContext[Any, Any], method: str, error: Exception) -> Any:
    if not isinstance(error, SparserowError):
        log.exception("%s failed", method)
        error = Internal(f"{type(error).__name__}: {error}")
    code, message, metadata = status_of_error(error)
    return await context.abort(code, message, metadata)


class ControlServer:
    """A listening gRPC server with the process's certificate and tokens (proto/security/security.py).

    Args:
        service: the full name, such as ``sparserow.v1.Coordinator``, whose health the server reports.
        add_service: registers the servicer with a server, and the servicers of ``beside``.
        host, port: the address; port 0 lets the system choose, and the attribute ``port`` has the choice.
        beside: full names of other services that it registers.
        health_port: the port of a second listener without TLS that has health alone, for probes that cannot show a
            certificate. 0 lets the system choose; None means no such listener.

    Raises:
        InvalidArgument: ``health_port`` is out of range.
        Unavailable: the server cannot listen on the address.
    """

    def __init__(
        self,
        service: str,
        add_service: Callable[[Any], None],
        *,
        host: str,
        port: int,
        beside: Sequence[str] = (),
        health_port: int | None = None,
    ) -> None:
        check_port_free(host, port)
        self._service = service
        self._server = grpc.aio.server(interceptors=(_Gate((service, *beside)),), options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        add_service(self._server)
        names = (service, *beside, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            credentials = server_credentials()
            self.port: int = (
                self._server.add_insecure_port(at)
                if credentials is None
                else self._server.add_secure_port(at, credentials)
            )
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {host}:{port}: {error}") from None
        self.host = host
        self._probes = None if health_port is None else self._probe_server(host, health_port)

    def _probe_server(self, host: str, port: int) -> Any:
        if not 0 <= port <= 65535:
            raise not_allowed("--health-port", port, "[0, 65535]")
        check_port_free(host, port, option="--health-port")
        server = grpc.aio.server(options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {host}:{port}: {error}") from None
        log.info("health is answered at %s:%d", host, bound)
        return server

    async def start(self) -> None:
        """Starts to answer; health reports NOT_SERVING until :meth:`set_serving`."""
        await self.set_serving(False)
        await self._server.start()
        if self._probes is not None:
            await self._probes.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets what the health service reports about this service and about the server."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in (self._service, ""):
            await self._health.set(name, status)

    async def stop(self, grace_sec: float) -> None:
        """Refuses new calls, and gives the calls under way ``grace_sec`` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_sec)
        if self._probes is not None:
            await self._probes.stop(None)
