"""One HTTP request and its reply, each within a time limit, whatever the client does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from aiohttp import web

from ..config.http_limits import HttpLimits

_CHUNK_BYTES = 64 << 10


class HttpExchange:
    """A request whose headers have arrived.

    Args:
        request: the request of aiohttp.
        limits: the time limits.

    Attributes:
        response: the reply; None until :meth:`send` begins.
    """

    def __init__(self, request: web.BaseRequest, limits: HttpLimits) -> None:
        self._request = request
        self._limits = limits
        self.response: web.StreamResponse | None = None
        self.method: str = request.method
        self.path: str = request.raw_path
        self.headers: Mapping[str, str] = request.headers
        self.query: Any = request.query
        self.peer: str = request.remote or ""

    async def read(self, length: int) -> bytes:
        """Returns a body of ``length`` bytes; a client that asked for permission to send it gets the permission.

        Raises:
            ConnectionError: the body did not arrive in time, or the connection ended before.
        """
        request = self._request
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        try:
            return await asyncio.wait_for(request.content.readexactly(length), self._limits.body_sec)
        except TimeoutError:
            self.abort()
            raise ConnectionError("the body did not come in time") from None
        except (asyncio.IncompleteReadError, web.RequestPayloadError):
            raise ConnectionError("the connection ended within the body") from None

    async def send(
        self,
        status: int,
        data: bytes,
        content_type: str,
        *,
        ends: bool = False,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Sends the reply in pieces, as fast as the client reads; returns when all are sent.

        Args:
            status: the HTTP status.
            data: the body.
            content_type: the value of the header Content-Type.
            ends: whether the connection is closed afterwards.
            headers: further headers.

        Raises:
            ConnectionError: the client did not read the reply in time; its connection is closed.
        """
        sent = {**headers, "Content-Type": content_type, "Server": "sparserow"}
        response = self.response = web.StreamResponse(status=status, headers=sent)
        response.content_length = len(data)
        if ends:
            response.force_close()

        async def write() -> None:
            await response.prepare(self._request)
            if self.method != "HEAD":
                for start in range(0, len(data), _CHUNK_BYTES):
                    await response.write(data[start : start + _CHUNK_BYTES])
            await response.write_eof()

        try:
            await asyncio.wait_for(write(), self._limits.reply_sec)
        except TimeoutError:
            self.abort()
            raise ConnectionError("the client did not read its reply in time") from None

    def abort(self) -> None:
        """Closes the connection at once."""
        if self._request.transport is not None:
            self._request.transport.abort()
