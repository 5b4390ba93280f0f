"""Answers the requests of the page: the HTML file to all, and figures to those whose token may see the status.

GET /             the page; it has no figure and no name
GET /status.json  the figures, with ``Authorization: Bearer TOKEN`` where the coordinator asks for tokens
"""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from ....proto.errors import PermissionDenied, SparserowError
from ....proto.process.access import caller_namespaces, check_call
from ....proto.security.security import bearer_token, process_security
from .replies import PageReplies
from .source import page_source

if TYPE_CHECKING:
    from ....proto.process.http_exchange import HttpExchange

log = logging.getLogger(__name__)

_METHOD = "/sparserow.v1.Coordinator/GetStatus"  # whose rights a viewer needs
_PATHS = ("/", "/status.json", "/favicon.ico")
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageFront:
    """Answers the requests of one page. It belongs to one event loop.

    Args:
        replies: makes the replies with figures.
        hosts: the names under which this server is reached on this machine alone. Another name in a request is refused
            while no token is asked for, because a foreign page may have it resolved to loopback. Empty: every name.
    """

    def __init__(self, replies: PageReplies, hosts: Collection[str] = ()) -> None:
        self._replies = replies
        self._hosts = frozenset(hosts)
        self._source = page_source()

    async def answer(self, exchange: HttpExchange) -> None:
        """Answers one request."""
        path = exchange.path.partition("?")[0]
        has_body = exchange.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in exchange.headers
        if exchange.method not in ("GET", "HEAD"):
            await self._refuse(exchange, 405, "the page is read with GET", {"Allow": "GET, HEAD"})
        elif has_body:
            await self._refuse(exchange, 400, "a request of the page has no body")
        elif path not in _PATHS:
            await self._refuse(exchange, 404, "this path is not served")
        elif not self._is_known(exchange.headers.get("Host", "")):
            await self._refuse(exchange, 421, "Host: this server is not reached by that name; dial its address")
        elif path == "/":
            headers = {**_HEADERS, "Content-Security-Policy": self._source.policy}
            html = self._source.html if process_security().tokens is None else self._source.asking
            await exchange.send(200, html, "text/html; charset=utf-8", headers=headers)
        elif path == "/favicon.ico":  # browsers ask for it by themselves
            await exchange.send(204, b"", "image/x-icon", headers=_HEADERS)
        else:
            await self._answer_figures(exchange)

    async def _answer_figures(self, exchange: HttpExchange) -> None:
        security, authorization = process_security(), exchange.headers.get("Authorization", "")
        metadata = [("authorization", authorization)]
        try:
            security.grant_of(bearer_token(metadata))
        except PermissionDenied as error:
            await self._refuse(exchange, 401, str(error), {"WWW-Authenticate": "Bearer"}, ends=False)
            return
        try:
            check_call(security, _METHOD, metadata)
            reply = await self._replies.reply(caller_namespaces())
        except PermissionDenied as error:
            await self._refuse(exchange, 403, str(error), ends=False)
        except SparserowError as error:
            await self._refuse(exchange, 503, str(error), ends=False)
        else:
            is_packed = "gzip" in exchange.headers.get("Accept-Encoding", "")
            headers = {**_HEADERS, "Vary": "Accept-Encoding", **({"Content-Encoding": "gzip"} if is_packed else {})}
            await exchange.send(200, reply.packed if is_packed else reply.plain, "application/json", headers=headers)

    def _is_known(self, host: str) -> bool:
        """Whether a request names this server by an address, or by a name that it has."""
        if not self._hosts or process_security().tokens is not None:
            return True
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        name = name.strip("[]").lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._hosts or name.endswith(".localhost")
        return True

    async def _refuse(
        self, exchange: HttpExchange, status: int, error: str, more: dict[str, str] | None = None, *, ends: bool = True
    ) -> None:
        data = json.dumps({"error": error}).encode()
        await exchange.send(status, data, "application/json", ends=ends, headers={**_HEADERS, **(more or {})})
