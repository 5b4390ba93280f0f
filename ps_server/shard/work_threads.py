"""Threads of a shard's Shard service: work that may take long never has those that membership changes need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from ...proto.errors import ResourceExhausted

P = ParamSpec("P")
T = TypeVar("T")


class WorkThreads:
    """Some threads of one kind of work; more of it waits for its turn.

    Args:
        name: of the threads.
        count: how many at most.
    """

    def __init__(self, name: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, name)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``work``, which goes on when the caller is cancelled."""
        return await asyncio.wrap_future(self.submit(work, *args, **kwargs))

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """``work`` in one of the threads."""
        return self._pool.submit(work, *args, **kwargs)


class OneAtATime:
    """One thread for work that may take long; while it works, more is refused.

    Args:
        name: of the thread.
        words: what the work is, for the refusal, such as ``shard 1: a sweep``.
    """

    def __init__(self, name: str, words: str) -> None:
        self._threads = WorkThreads(name, 1)
        self._words = words
        self._running: Future[Any] | None = None

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``work``, which goes on when the caller is cancelled.

        Raises:
            ResourceExhausted: such work is running, also where its caller is gone.
        """
        if self._running is not None and not self._running.done():
            raise ResourceExhausted(f"{self._words} is running, and one runs at a time; try again when it has ended")
        running = self._running = self._threads.submit(work, *args, **kwargs)
        return await asyncio.shield(asyncio.wrap_future(running))
