"""An HTTP server of a process: aiohttp behind a listener that bounds connections, headers and time.

A connection counts from the moment it is accepted, before TLS. Each connection uses the certificate that the process
has at that moment. Connections have no threads of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from ..config.http_limits import HttpLimits
from ..errors import Unavailable
from ..security.security import Security, process_security
from .http_exchange import HttpExchange
from .log_rate import RateLimit

log = logging.getLogger(__name__)
log.addFilter(RateLimit())

Answer = Callable[[HttpExchange], Awaitable[None]]

_HANDSHAKE_SEC = 5.0
_CLOSE_SEC = 5.0  # how long a client may take for its part of the end of TLS; its connection counts until then
_LINGER_SEC = 2.0  # time in which a refused body is read and dropped, so that its client sees the reply
_LINE_BYTES = 4096
_HEADERS = 64
_BACKLOG = 128
_INTERNAL = b'{"error": "an internal error, which the server has logged"}'
_ACCEPT_PAUSE_SEC = 0.1  # after an accept that failed, for example for want of file descriptors


@functools.lru_cache(maxsize=1)
def _tls_context(security: Security) -> ssl.SSLContext | None:
    """Returns a TLS context with the certificate of a security file; None when the file has no certificate."""
    if not security.certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with os.fdopen(os.memfd_create("certificate"), "w") as chain:  # the ssl module reads certificates only from files
        chain.write(security.certificate + "\n" + security.key)
        chain.flush()
        context.load_cert_chain(f"/proc/self/fd/{chain.fileno()}")
    if security.client_authorities:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=security.client_authorities)
    return context


class _Connection:
    """One accepted socket, which a task has during the handshake, and a protocol of aiohttp afterwards."""

    def __init__(self, peer: str, accepted: socket.socket) -> None:
        self.peer = peer
        self.socket = accepted
        self.task: asyncio.Task[None] | None = None
        self.protocol: web.RequestHandler | None = None
        self.is_busy = False

    def abort(self) -> None:
        """Closes the connection at once."""
        if self.protocol is not None and self.protocol.transport is not None:
            self.protocol.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class _Server(web.Server):
    """The server of aiohttp, which also reports the end of a connection."""

    def __init__(self, handle: Any, ended: Callable[[web.RequestHandler], None], **options: Any) -> None:
        super().__init__(handle, **options)
        self._ended = ended

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._ended(handler)


class HttpServer:
    """An HTTP server that listens from its creation, and answers from :meth:`start` to :meth:`close`.

    It belongs to one event loop. When all connections are taken, the client with the most connections gives up an idle
    one for a client with fewer.

    Args:
        host, port: the address; port 0 lets the system choose, and the attribute ``port`` has the choice.
        answer: sends the reply to each request; an error that it raises is logged and answered with status 500.
        limits: the limits of connections, headers and time.
        client_connections: the number of connections that one address may have; None: all of them.
        secured: whether connections use the process's certificate, where it has one; False serves plain HTTP.

    Raises:
        Unavailable: the server cannot listen on the address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Answer,
        limits: HttpLimits,
        *,
        client_connections: int | None = None,
        secured: bool = True,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise Unavailable(f"cannot listen on {host}:{port}: {error}") from None
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._answer = answer
        self._limits = limits
        self._client_connections = min(client_connections or limits.connections, limits.connections)
        self._secured = secured
        self._connections: dict[_Connection, None] = {}  # in order of arrival
        self._of_peer: Counter[str] = Counter()
        self._of_protocol: dict[web.RequestHandler, _Connection] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._server: _Server | None = None

    async def start(self) -> None:
        """Accepts connections from now on."""
        self._server = _Server(
            self._handle,
            self._ended,
            keepalive_timeout=self._limits.head_sec,
            lingering_time=_LINGER_SEC,
            max_line_size=_LINE_BYTES,
            max_field_size=_LINE_BYTES,
            max_headers=_HEADERS,
            auto_decompress=False,  # decompression would turn a small body into a large one
            access_log=None,
            logger=log,
        )
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def close(self) -> None:
        """Stops listening and closes every connection."""
        if self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
        self._listener.close()
        for connection in list(self._connections):
            connection.abort()
        tasks = [connection.task for connection in self._connections if connection.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("HTTP: no connection can be accepted: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_SEC)
                continue
            peer = str(address[0])
            if not self._make_room(peer):
                log.warning("HTTP: %s has %d connections; another one is refused", peer, self._of_peer[peer])
                accepted.close()
                continue
            connection = _Connection(peer, accepted)
            self._connections[connection] = None
            self._of_peer[peer] += 1
            connection.task = loop.create_task(self._take(connection))

    def _make_room(self, peer: str) -> bool:
        """Whether the peer may have one more connection; when all places are taken, the peer
        with the most loses one.
        """
        if self._of_peer[peer] >= self._client_connections:
            return False
        if len(self._connections) < self._limits.connections:
            return True
        largest, count = self._of_peer.most_common(1)[0]
        if count <= self._of_peer[peer] + 1:
            return False
        idle = (one for one in self._connections if one.peer == largest and not one.is_busy)
        given_up = next(idle, None)
        if given_up is None:
            return False
        self._forget(given_up)
        given_up.abort()
        return True

    async def _take(self, connection: _Connection) -> None:
        """Does the handshake of a connection, with the present certificate."""
        assert self._server is not None
        context = _tls_context(process_security()) if self._secured else None
        times: dict[str, float] = {}
        if context is not None:
            times = {"ssl_handshake_timeout": _HANDSHAKE_SEC, "ssl_shutdown_timeout": _CLOSE_SEC}
        protocol = self._server()
        self._of_protocol[protocol] = connection
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, connection.socket, ssl=context, **times
            )
            connection.protocol = protocol
            if connection not in self._connections:  # the connection was given up meanwhile
                connection.abort()
        except BaseException as error:
            connection.socket.close()
            self._ended(protocol)
            if not isinstance(error, OSError | ssl.SSLError | asyncio.TimeoutError | asyncio.CancelledError):
                raise

    def _ended(self, protocol: web.RequestHandler) -> None:
        connection = self._of_protocol.pop(protocol, None)
        if connection is not None:
            self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._of_peer[connection.peer] -= 1
            if not self._of_peer[connection.peer]:
                del self._of_peer[connection.peer]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = self._of_protocol.get(request.protocol)
        if connection is not None:
            connection.is_busy = True
        exchange = HttpExchange(request, self._limits)
        try:
            await self._answer(exchange)
        except ConnectionError:  # the client has gone, or was too slow
            exchange.abort()
        except Exception:
            log.exception("HTTP: a request failed")
            if exchange.response is not None:
                exchange.abort()
            else:
                with contextlib.suppress(ConnectionError):
                    await exchange.send(500, _INTERNAL, "application/json", ends=True)
        finally:
            if connection is not None:
                connection.is_busy = False
        return exchange.response or web.Response(status=408)
