"""Writes a cluster's state outside of the event loop, because a write to etcd may take seconds (etcd.py).

``save()`` takes the present state; ``written()`` waits until it is saved. Every message that depends on the state waits
so before it leaves the process: calls of shards (shard_calls.py), answers to clients (leader_election.py), and the
removal of older checkpoints. States that are taken during a write are saved by one further write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ....proto.errors import SparserowError


class StateWriter:
    """Writes the state of a cluster in a thread. It belongs to one event loop and has to be closed.

    Args:
        document: returns the present state.
        write: saves a document; it may block, and runs in a thread of its own.

    Attributes:
        saves: the number of times that the state was taken.
    """

    def __init__(self, document: Callable[[], dict[str, Any]], write: Callable[[dict[str, Any]], None]) -> None:
        self._document = document
        self._write = write
        self._thread = ThreadPoolExecutor(1, "sparserow-state")
        self._next: dict[str, Any] = {}
        self._kept = 0  # the number of the newest save that is written
        self._writing: asyncio.Task[None] | None = None
        self.saves = 0

    async def close(self) -> None:
        """Waits for the write that is under way; later states are not written."""
        if self._writing is not None:
            with contextlib.suppress(SparserowError):
                await self._writing
        self._thread.shutdown(wait=False)

    def save(self) -> None:
        """Starts a write of the present state; :meth:`written` reports a failure."""
        self._next = self._document()
        self.saves += 1
        self._begin()

    async def written(self) -> None:
        """Returns when the state of the last :meth:`save` is written; at once when there is nothing to write.

        Raises:
            SparserowError: the state could not be written; the next call tries again.
        """
        wanted = self.saves
        while self._kept < wanted:
            await asyncio.shield(self._begin())

    def _begin(self) -> asyncio.Task[None]:
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._run())
            self._writing.add_done_callback(_retrieve)
        return self._writing

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._kept < self.saves:
            number = self.saves
            await loop.run_in_executor(self._thread, self._write, self._next)
            self._kept = number


def _retrieve(writing: asyncio.Task[None]) -> None:
    """Marks a failure as seen when no caller waits for it; the next caller that waits tries again."""
    if not writing.cancelled():
        writing.exception()
