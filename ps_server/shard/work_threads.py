"""The threads of a shard's Shard service, so that long work does not take the threads of membership changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from ...proto.errors import ResourceExhausted

P = ParamSpec("P")
T = TypeVar("T")


class WorkThreads:
    """A bounded number of threads for one kind of work; further work waits for its turn.

    Args:
        name: the name of the threads.
        count: the largest number of threads.
    """

    def __init__(self, name: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, name)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result of ``work``, which continues when the caller is cancelled."""
        return await asyncio.wrap_future(self.submit(work, *args, **kwargs))

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs ``work`` in one of the threads, and returns its future."""
        return self._pool.submit(work, *args, **kwargs)


class OneAtATime:
    """One thread for work that may take long; while it works, further work is refused.

    Args:
        name: the name of the thread.
        words: names the work in the refusal, such as ``shard 1: a sweep``.
    """

    def __init__(self, name: str, words: str) -> None:
        self._threads = WorkThreads(name, 1)
        self._words = words
        self._running: Future[Any] | None = None

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result of ``work``, which continues when the caller is cancelled.

        Raises:
            ResourceExhausted: such work is running, also when its caller has gone.
        """
        if self._running is not None and not self._running.done():
            raise ResourceExhausted(f"{self._words} is running, and one runs at a time; try again when it has ended")
        running = self._running = self._threads.submit(work, *args, **kwargs)
        return await asyncio.shield(asyncio.wrap_future(running))
