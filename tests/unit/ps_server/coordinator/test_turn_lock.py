"""The lock of table changes: namespaces take turns, and callers that give up leave it to others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sparserow.ps_server.coordinator.procedures.turn_lock import TurnLock


def run(scene: Callable[[TurnLock], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(TurnLock()), 60))


def test_a_namespace_with_many_calls_does_not_hold_up_another() -> None:
    async def scene(lock: TurnLock) -> None:
        order: list[str] = []

        async def change(namespace: str) -> None:
            await lock.acquire(namespace)
            order.append(namespace)
            await asyncio.sleep(0)
            lock.release()

        async def whole() -> None:
            async with lock:
                order.append("whole")

        await lock.acquire("ads")
        calls = [asyncio.create_task(change("ads")) for _ in range(300)]
        calls += [asyncio.create_task(change(name)) for name in ("news", "news", "shop")]
        calls.append(asyncio.create_task(whole()))
        await asyncio.sleep(0)  # all of them wait
        lock.release()
        await asyncio.gather(*calls)
        assert order[:8] == ["ads", "news", "shop", "whole", "ads", "news", "ads", "ads"]
        assert order.count("ads") == 300
        await lock.acquire("ads")  # it is free again

    run(scene)


def test_a_caller_that_gives_up_leaves_its_turn_to_the_next() -> None:
    async def scene(lock: TurnLock) -> None:
        await lock.acquire("ads")
        first, second, third = (asyncio.create_task(lock.acquire(name)) for name in ("ads", "news", "ads"))
        await asyncio.sleep(0)
        first.cancel()
        lock.release()
        second.cancel()  # it was given the lock, and has not gone on yet
        await asyncio.gather(first, second, return_exceptions=True)
        await third
        lock.release()
        await lock.acquire("shop")

    run(scene)
