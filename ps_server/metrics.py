"""Prometheus metrics of a server process: read when they are asked for, so that counting costs nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import start_http_server
from prometheus_client.registry import Collector, CollectorRegistry

from .listen import check_port_free


@contextlib.contextmanager
def serve_metrics(collector: Collector, *, host: str, port: int | None) -> Iterator[int | None]:
    """Serves ``http://host:port/metrics`` for the duration of the block; yields the port. ``port`` None is off.

    Raises:
        Unavailable: the port is taken.
    """
    if port is None:
        yield None
        return
    check_port_free(host, port, option="metrics port")
    registry = CollectorRegistry()
    registry.register(collector)
    server, thread = start_http_server(port, addr=host, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
