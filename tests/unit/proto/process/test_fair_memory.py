"""The account of memory: who gets how much, who waits, and what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import pytest

from sparserow.proto.config.http_limits import HttpLimits
from sparserow.proto.errors import InvalidArgument, Unavailable
from sparserow.proto.options.document import validate
from sparserow.proto.process.fair_memory import FairMemory
from sparserow.proto.process.log_rate import RateLimit


def test_one_client_gets_half_and_a_newcomer_always_finds_room() -> None:
    async def run() -> None:
        memory = FairMemory(100, wait_sec=0.05)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(50):
                await stack.enter_async_context(memory.charged("greedy", 1))
            with pytest.raises(Unavailable, match="the memory for requests is in use"):
                await stack.enter_async_context(memory.charged("greedy", 1))
            for _ in range(25):
                await stack.enter_async_context(memory.charged("newcomer", 1))
            with pytest.raises(Unavailable):
                await stack.enter_async_context(memory.charged("newcomer", 1))
            await stack.enter_async_context(memory.charged("third", 12))
        for _ in range(3):  # all came back
            async with memory.charged("greedy", 50):
                pass

    asyncio.run(run())


def test_waiting_requests_go_on_in_their_order_and_leave_nothing_when_they_give_up() -> None:
    async def run() -> None:
        memory = FairMemory(100, wait_sec=5.0)
        order: list[int] = []

        async def take(number: int) -> None:
            async with memory.charged("one", 50):
                order.append(number)
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(take(number)) for number in range(4)]
        await asyncio.sleep(0.001)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 1, 3]
        async with memory.charged("one", 50):
            pass

    asyncio.run(run())


def test_limits_that_no_request_could_meet_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="memory_bytes: 1048576 is too little for body_bytes; allowed: at least"):
        validate(HttpLimits, {"memory_bytes": "1MiB"})


def test_lines_of_very_many_kinds_are_few_and_forgotten() -> None:
    limit = RateLimit(lines=1, period_sec=1.0)

    def line(kind: int) -> logging.LogRecord:
        record = logging.LogRecord("x", logging.INFO, "", 0, "refused", (), None)
        record.kind = ("127.0.0.1", kind)
        return record

    written = sum(limit.filter(line(kind)) for kind in range(5000))
    assert 1024 <= written <= 1100
    assert len(limit._kinds) <= 1025
    assert not limit.filter(line(0))
    time.sleep(1.1)
    assert limit.filter(line(6000))
    assert len(limit._kinds) <= 2


def test_lines_of_a_kind_are_few_and_those_left_out_are_counted() -> None:
    limit = RateLimit(lines=2, period_sec=0.05)

    def line(text: str, *arguments: object) -> logging.LogRecord:
        return logging.LogRecord("x", logging.WARNING, "", 0, text, arguments, None)

    written = [limit.filter(line("peer %s is refused", number)) for number in range(10)]
    assert written == [True, True] + [False] * 8
    assert limit.filter(line("another kind"))
    asyncio.run(asyncio.sleep(0.06))
    after = line("peer %s is refused", 11)
    assert limit.filter(after)
    assert after.getMessage() == "peer 11 is refused (8 such lines before it were left out)"
