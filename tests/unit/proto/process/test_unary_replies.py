"""Unary replies of rows: how many fit, and what a client is charged until its call has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sparserow.proto import serving_pb2
from sparserow.proto.errors import InvalidArgument, Unavailable
from sparserow.proto.process.fair_memory import FairMemory
from sparserow.proto.process.unary_replies import UNARY_REPLY_BYTES, UnaryReplies
from sparserow.serving.service import Address, ServingService

DIM = 1024
ROW = 4 * DIM + 12


class Call:
    """As much of a gRPC call as is asked of one."""

    def __init__(self, peer: str, token: str) -> None:
        self._peer, self._token = peer, token
        self.done: list[Callable[[Any], None]] = []

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token}"),)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.done.append(callback)

    def end(self) -> None:
        for callback in self.done:
            callback(self)


def test_a_reply_that_is_too_large_says_how_many_keys_fit() -> None:
    async def run() -> None:
        replies = UnaryReplies()
        await replies.charge(Call("ipv4:10.0.0.1:5", "a"), {"user": (UNARY_REPLY_BYTES // ROW, DIM)})
        with pytest.raises(InvalidArgument, match=f"which holds {UNARY_REPLY_BYTES // ROW} of 'user'"):
            await replies.charge(Call("ipv4:10.0.0.1:5", "a"), {"user": (UNARY_REPLY_BYTES // ROW + 1, DIM)})
        half = UNARY_REPLY_BYTES // ROW // 2 + 2
        with pytest.raises(InvalidArgument, match=r"of 'user', .* of 'item'"):
            await replies.charge(Call("ipv4:10.0.0.1:5", "a"), {"user": (half, DIM), "item": (half, DIM)})

    asyncio.run(run())


def test_a_lookup_that_is_too_large_is_refused_before_rows_are_read() -> None:
    class Lookup:
        def dims(self, _model: str, tables: Any, _routing_key: str, *, token: str) -> dict[str, int]:
            assert token == "a"
            return dict.fromkeys(tables, DIM)

        def lookup(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("rows were read")

    async def run() -> None:
        service = ServingService(None, Lookup(), None, Address("127.0.0.1", 1))  # type: ignore[arg-type]
        table = serving_pb2.TableKeys(table="user", packed_keys=bytes(8 * 20_000))
        with pytest.raises(InvalidArgument, match="which holds"):
            await service.Lookup(serving_pb2.LookupRequest(model="m", tables=[table]), Call("ipv4:10.0.0.1:5", "a"))

    asyncio.run(run())


def test_replies_are_charged_to_a_token_at_an_address_until_the_call_has_ended() -> None:
    async def run() -> None:
        replies = UnaryReplies(FairMemory(12 * ROW, wait_sec=0.05))  # three copies of a row are charged
        first = [Call(f"ipv4:10.0.0.1:{port}", "a") for port in (1, 2)]
        for call in first:
            await replies.charge(call, {"user": (1, DIM)})
        with pytest.raises(Unavailable):
            await replies.charge(Call("ipv4:10.0.0.1:3", "a"), {"user": (1, DIM)})
        await replies.charge(Call("ipv4:10.0.0.1:4", "b"), {"user": (1, DIM)})  # another account finds room
        for call in first:
            call.end()
        await replies.charge(Call("ipv4:10.0.0.1:5", "a"), {"user": (1, DIM)})

    asyncio.run(run())
