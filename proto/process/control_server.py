"""A gRPC server of the control plane: one service of Sparserow, with health and reflection beside it.

Errors of the taxonomy become gRPC statuses only in this module. Any other error is a bug, logged with its traceback and
answered as Internal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PermissionDenied,
    SparserowError,
    Unavailable,
    not_allowed,
)
from ..grpc_status import SERVER_OPTIONS, status_of_error
from ..request_bounds import PARSED_BYTES, parse
from ..request_names import check_names
from ..security.security import bearer_token, process_security
from .access import check_call, check_request, server_credentials
from .fair_memory import FairMemory
from .listen import check_port_free
from .log_rate import RateLimit
from .unary_replies import account_of

log = logging.getLogger(__name__)
log.addFilter(RateLimit())  # peers cause these lines

ROWS_MESSAGE_BYTES = 16 << 20  # of a message with rows or keys
_READ_SEC = 30.0  # for a message to come
_MESSAGES_AT_ONCE = 32  # of the longest kind may be on their way
_LEAST_MEMORY_BYTES = 256 << 20  # for the messages of all calls
_CALLS_AT_ONCE = 4096
_PROBE_BYTES = 4 << 10
_PROBES_AT_ONCE = 256


class _Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls that their token does not allow, bounds what they hold, and turns errors into statuses.

    Every method is served as one that reads a stream of messages, because grpc.aio takes the message of another one
    before any of our code runs. So the token is looked at first, and the message is charged while it comes.

    Args:
        services: the full names of the services that need a token.
        message_bytes: the most bytes of a message.
    """

    def __init__(self, services: Sequence[str], message_bytes: int) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._message_bytes = message_bytes
        self._memory = FairMemory(max(_LEAST_MEMORY_BYTES, _MESSAGES_AT_ONCE * message_bytes))

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        if method.startswith(f"/{health.SERVICE_NAME}/"):
            received: Callable[[str, Any, Any, Any], Any] = self._probed
        elif method.startswith(f"/{reflection.SERVICE_NAME}/"):
            return grpc.stream_stream_rpc_method_handler(
                self._reflecting(handler, method), handler.request_deserializer, handler.response_serializer
            )
        else:
            assert method.startswith(self._prefixes), method
            received = self._received

        async def answer(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                async with received(method, handler.request_deserializer, requests, context) as request:
                    return await handler.unary_unary(request, context)
            except asyncio.CancelledError as given_up:
                return await _abort(context, method, _unavailable(context, method, given_up))
            except Exception as error:
                return await _abort(context, method, error)

        async def answer_many(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async with received(method, handler.request_deserializer, requests, context) as request:
                    replies = handler.unary_stream(request, context)
                    if asyncio.iscoroutine(replies):  # as health's Watch, which writes to the call itself
                        await replies
                        return
                    async for reply in replies:
                        yield reply
            except asyncio.CancelledError as given_up:
                await _abort(context, method, _unavailable(context, method, given_up))
            except Exception as error:
                await _abort(context, method, error)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(answer_many, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    @contextlib.asynccontextmanager
    async def _received(self, method: str, parser: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        """Yields the message of a call, which is charged to its client for the duration of the block.

        Raises:
            PermissionDenied: the token does not allow the call; then nothing of the message was read.
            InvalidArgument: there is no message, or it has more entries or longer names than are allowed.
            DeadlineExceeded: the message has not come in time.
            Unavailable: there was no room for it.
        """
        check_call(process_security(), method, context.invocation_metadata())
        async with self._read(method, parser, requests, context) as request:
            check_request(request)
            check_names(request)
            yield request

    @contextlib.asynccontextmanager
    async def _read(self, method: str, parser: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        client = account_of(context)
        async with self._memory.charged(client, self._message_bytes):  # its length is known when it is there
            try:
                raw = await asyncio.wait_for(anext(aiter(requests), None), _READ_SEC)
            except TimeoutError:
                raise DeadlineExceeded(f"the message of the call has not come within {_READ_SEC:.0f} s") from None
        if raw is None:
            raise InvalidArgument("the call has no message")
        async with self._memory.charged(client, PARSED_BYTES * len(raw)):
            yield parse(method.rpartition("/")[2], raw, parser)

    @contextlib.asynccontextmanager
    async def _probed(self, method: str, parser: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        """As :meth:`_received` for health: without a token the call is of the whole process, and nothing is read.

        Raises:
            PermissionDenied: such a peer watches for changes too, for which a call would stay.
        """
        try:
            process_security().grant_of(bearer_token(context.invocation_metadata()))
        except PermissionDenied:
            if method.endswith("/Watch"):
                raise
            yield health_pb2.HealthCheckRequest()
            return
        async with self._read(method, parser, requests, context) as request:
            yield request

    def _reflecting(self, handler: Any, method: str) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def answer(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                process_security().grant_of(bearer_token(context.invocation_metadata()))
                async with self._memory.charged(account_of(context), self._message_bytes):
                    async for reply in handler.stream_stream(requests, context):
                        yield reply
            except Exception as error:
                await _abort(context, method, error)

        return answer


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


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    """Health with the method List, which the package lacks."""

    async def List(self, _request: Any, _context: Any) -> Any:  # noqa: N802 - gRPC names it
        """Answers with the state of each service."""
        states = {name: health_pb2.HealthCheckResponse(status=it) for name, it in self._server_status.items()}
        return health_pb2.HealthListResponse(statuses=states)


class ControlServer:
    """A listening gRPC server with the process's certificate and tokens (proto/security/security.py).

    Args:
        service: the full name, such as ``sparserow.v1.Coordinator``, whose health the server reports.
        add_service: registers the servicer with a server, and the servicers of ``beside``.
        host, port: the address; port 0 lets the system choose, and the attribute ``port`` has the choice.
        beside: full names of other services that it registers.
        message_bytes: the most bytes of a message that a client sends.
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
        message_bytes: int = 4 << 20,
        health_port: int | None = None,
    ) -> None:
        check_port_free(host, port)
        self._service = service
        self._server = grpc.aio.server(
            interceptors=(_Gate((service, *beside), message_bytes),),
            options=(*SERVER_OPTIONS, ("grpc.max_receive_message_length", message_bytes)),
            maximum_concurrent_rpcs=_CALLS_AT_ONCE,
        )
        self._health = _Health()
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
        server = grpc.aio.server(
            interceptors=(_Gate((), _PROBE_BYTES),),
            options=(*SERVER_OPTIONS, ("grpc.max_receive_message_length", _PROBE_BYTES)),
            maximum_concurrent_rpcs=_PROBES_AT_ONCE,
        )
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
