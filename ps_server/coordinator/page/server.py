"""Serves the page of a coordinator for the duration of a block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from ....proto import control_pb2 as pb
from ....proto.process.advertise import Advertised
from ....proto.process.listen import check_port_free, is_loopback
from ....proto.security.security import process_security

CONNECTIONS = 256  # of all viewers; a browser has up to six


@contextlib.asynccontextmanager
async def serve_page(
    read: Callable[[], Awaitable[pb.GetStatusReply]],
    *,
    shards: int,
    host: str,
    port: int | None,
    public: Advertised,
    coordinator: str,
) -> AsyncIterator[str]:
    """Serves the page, with TLS where the process has a certificate, and yields its URL; ``port`` None serves none and
    yields "".

    Args:
        read: returns the status of all namespaces.
        shards: the number of shards of the cluster.
        host, port: the address to listen on, which the caller has checked; port 0 lets the system choose.
        public: the host under which others reach this one, for the URL.
        coordinator: ``HOST:PORT`` of the coordinator, for the commands that the page shows.

    Raises:
        Unavailable: the port is taken.
    """
    if port is None:
        yield ""
        return
    from ....proto.process.http_server import HttpServer  # a coordinator without a page does not load aiohttp
    from .front import PageFront
    from .replies import PageReplies

    check_port_free(host, port, option="--page-port")
    replies = PageReplies(read, shards=shards, coordinator=coordinator)
    hosts = ("localhost", host.lower(), public.host.lower()) if is_loopback(host) else ()
    limits = process_security().limits
    server = HttpServer(
        host,
        port,
        PageFront(replies, hosts).answer,
        limits.http.model_copy(update={"connections": min(CONNECTIONS, limits.http.connections)}),
        client_connections=limits.client_connections,
    )
    scheme = "https" if process_security().certificate else "http"
    url = f"{scheme}://{Advertised(public.host).address(server.port)}/"
    try:
        await server.start()
        sampling = asyncio.get_running_loop().create_task(replies.sample_forever())
        try:
            yield url
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
    finally:
        await server.close()
