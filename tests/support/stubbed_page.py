"""The page of a coordinator over a status that a test makes up, served by a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from sparserow.proto import control_pb2 as pb
from sparserow.proto.config.http_limits import HttpLimits
from sparserow.proto.process.http_server import HttpServer
from sparserow.ps_server.coordinator.page.front import PageFront
from sparserow.ps_server.coordinator.page.replies import PageReplies

BOUNDS = (0.001, 0.01, 0.1)


def large_status(shards: int, tables: int) -> pb.GetStatusReply:
    """A ready cluster of so many shards, each with rows of so many tables."""
    reply = pb.GetStatusReply(cluster_id=5, slot_count=16384, ready=True)
    for number in range(tables):
        reply.tables.add(id=number + 1, namespace="ads", name=f"table-{number:03}", dim=16)
    for index in range(shards):
        shard = reply.shards.add(shard=index, state="SERVING", pid=100 + index, used_bytes=1 << 30, requests=1000)
        shard.data.host, shard.data.port = "10.0.0.1", 7000 + index
        shard.load.time_bounds_sec.extend(BOUNDS)
        shard.load.times.add(kind="pull", requests=(1, 2, 3, 0))
        for number in range(tables):
            shard.tables.add(table_id=number + 1, rows=10 * (index + 1), total_bytes=1 << 20)
    return reply


class StubbedPage:
    """A served page whose status the test sets.

    Attributes:
        status: what the next reading returns; an error is raised.
        reads: the number of readings so far.
        url: the address of the page.
        replies: makes its replies.
        tamper: changes the text of a reply before it is sent; None leaves it as it is.
    """

    def __init__(self, status: pb.GetStatusReply | Exception) -> None:
        self.status = status
        self.reads = 0
        self.tamper: Any = None
        self.replies = PageReplies(self._read, shards=1, coordinator="127.0.0.1:7000")

    async def _read(self) -> pb.GetStatusReply:
        self.reads += 1
        if isinstance(self.status, Exception):
            raise self.status
        return self.status

    async def start(self, port: int, limits: HttpLimits) -> HttpServer:
        """Serves the page from now on."""
        front = PageFront(self.replies, ("localhost",))

        async def answer(exchange: Any) -> None:
            send = exchange.send

            async def tampered(status: int, data: bytes, kind: str, **more: Any) -> None:
                if self.tamper is not None and kind == "application/json" and status == 200:
                    data = self.tamper(data)
                await send(status, data, kind, **more)

            exchange.send = tampered
            if self.tamper is not None:
                exchange.headers = {
                    name: value for name, value in exchange.headers.items() if name != "Accept-Encoding"
                }
            await front.answer(exchange)

        server = HttpServer("127.0.0.1", port, answer, limits)
        await server.start()
        self.port = server.port
        self.url = f"http://127.0.0.1:{server.port}/"
        return server


@contextlib.contextmanager
def stubbed_page(
    status: pb.GetStatusReply | Exception, *, port: int = 0, limits: HttpLimits | None = None
) -> Iterator[StubbedPage]:
    """Serves a page in a thread for the duration of the block."""
    page = StubbedPage(status)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(page.start(port, limits or HttpLimits()), loop).result(30)
        try:
            yield page
        finally:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
