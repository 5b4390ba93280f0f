"""A call whose work is given up on the server is answered, and its caller does not wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from sparserow.proto import control_pb2 as pb, control_pb2_grpc
from sparserow.proto.process.control_server import ControlServer

DEADLINE_SEC = 60.0


class GivenUp(control_pb2_grpc.ShardServicer):
    """Waits for work that somebody else cancels, before or after its first reply."""

    def __init__(self) -> None:
        self.work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.was_cancelled = asyncio.Event()

    async def Stats(self, _request: Any, _context: Any) -> pb.ShardStatsReply:
        try:
            await asyncio.shield(self.work)
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        return pb.ShardStatsReply()

    async def Load(self, _request: Any, _context: Any) -> AsyncIterator[pb.LoadReply]:
        yield pb.LoadReply(rows=1)
        await self.work


def served(scene: Any) -> None:
    async def run() -> None:
        servicer = GivenUp()
        server = ControlServer(
            "sparserow.v1.Shard",
            lambda server: control_pb2_grpc.add_ShardServicer_to_server(servicer, server),
            host="127.0.0.1",
            port=0,
        )
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                await scene(servicer, control_pb2_grpc.ShardStub(channel))
        finally:
            await server.stop(0)

    asyncio.run(asyncio.wait_for(run(), 2 * DEADLINE_SEC))


def test_a_reply_tells_that_the_work_was_given_up() -> None:
    async def scene(servicer: GivenUp, stub: control_pb2_grpc.ShardStub) -> None:
        call = stub.Stats(pb.ShardStatsRequest(), timeout=DEADLINE_SEC)
        asyncio.get_running_loop().call_later(0.2, servicer.work.cancel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "Stats was given up by the server; ask again" in refused.value.details()

    served(scene)


def test_a_stream_tells_that_the_work_was_given_up() -> None:
    async def scene(servicer: GivenUp, stub: control_pb2_grpc.ShardStub) -> None:
        replies = stub.Load(pb.LoadRequest(), timeout=DEADLINE_SEC)
        assert (await replies.read()).rows == 1
        servicer.work.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await replies.read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    served(scene)


def test_a_caller_that_cancels_ends_the_method() -> None:
    async def scene(servicer: GivenUp, stub: control_pb2_grpc.ShardStub) -> None:
        call = stub.Stats(pb.ShardStatsRequest(), timeout=DEADLINE_SEC)
        await asyncio.sleep(0.2)
        call.cancel()
        await asyncio.wait_for(servicer.was_cancelled.wait(), DEADLINE_SEC)
        with pytest.raises(asyncio.CancelledError):
            await call

    served(scene)
