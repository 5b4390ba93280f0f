"""Serves the Prometheus metrics of a process; they are collected when they are requested, so counting costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from ..security.fresh_security import fresh
from ..security.security import process_security
from .listen import check_port_free

if TYPE_CHECKING:
    from .http_exchange import HttpExchange
    from .http_server import HttpServer

_CONNECTIONS = 64
_AT_ONCE = 4  # number of pages that are made or sent at once


class SecurityMetrics(Collector):
    """Collects what each process with a page reports of its security files."""

    def collect(self) -> Iterator[Metric]:
        """Yields the values at this moment."""
        yield GaugeMetricFamily(
            "sparserow_security_problem",
            "Sets of security files that cannot be used as they are now, so that earlier ones are in force (count).",
            value=float(bool(fresh().problem)),
        )


@contextlib.contextmanager
def serve_metrics(collector: Collector, *, host: str, port: int | None) -> Iterator[int | None]:
    """Serves ``http://host:port/metrics`` for the duration of the block, and yields the port; ``port`` None serves
    none.

    Raises:
        Unavailable: the port is taken.
    """
    if port is None:
        yield None
        return
    from .http_server import HttpServer  # a process without a page does not load aiohttp

    check_port_free(host, port, option="metrics port")
    registry = CollectorRegistry()
    registry.register(collector)
    registry.register(SecurityMetrics())
    limits = process_security().limits
    server = HttpServer(
        host,
        port,
        _Page(registry).answer,
        limits.http.model_copy(update={"connections": _CONNECTIONS}),
        client_connections=limits.client_connections,
        secured=False,
    )
    with _running(server):
        yield server.port


@contextlib.contextmanager
def _running(server: HttpServer) -> Iterator[None]:
    """Runs the server in a thread of its own, so that programs with and without an event loop can have pages."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="sparserow-metrics", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(5.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5.0)
        loop.close()


class _Page:
    """The metrics page; at most a few copies are made at once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def answer(self, exchange: HttpExchange) -> None:
        """Sends the page in the format that the client accepts."""
        if exchange.method not in ("GET", "HEAD"):
            await exchange.send(405, b"the page is read with GET\n", "text/plain", ends=True)
            return
        encode, content_type = choose_encoder(exchange.headers.get("Accept", ""))
        registry: Any = self._registry
        if "name[]" in exchange.query:
            registry = registry.restricted_registry(exchange.query.getall("name[]"))
        async with self._turns:
            page = await asyncio.get_running_loop().run_in_executor(None, encode, registry)
            await exchange.send(200, page, content_type)
