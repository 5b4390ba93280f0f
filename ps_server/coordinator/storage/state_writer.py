"""Writes a cluster's state behind the event loop, where a write may take seconds (etcd.py).

``save()`` takes the state of that moment; ``written()`` waits until it is kept. Whatever leaves the process and depends
on the state waits so: calls of shards (shard_calls.py), answers to clients (leader_election.py), and the removal of
older checkpoints.
States that were taken while one is written are one write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ....proto.errors import SparserowError


class StateWriter:
    """Belongs to one event loop; close it.

    Args:
        document: gives the state of now.
        write: keeps a document; blocks, in a thread of its own.

    Attributes:
        saves: how often the state was taken.
    """

    def __init__(self, document: Callable[[], dict[str, Any]], write: Callable[[dict[str, Any]], None]) -> None:
        self._document = document
        self._write = write
        self._thread = ThreadPoolExecutor(1, "sparserow-state")
        self._next: dict[str, Any] = {}
        self._kept = 0  # the number of the newest save that is kept
        self._writing: asyncio.Task[None] | None = None
        self.saves = 0

    async def close(self) -> None:
        """Waits for the write that is under way; what comes later is not written."""
        if self._writing is not None:
            with contextlib.suppress(SparserowError):
                await self._writing
        self._thread.shutdown(wait=False)

    def save(self) -> None:
        """Has the state of now written; a write that fails is told by :meth:`written`."""
        self._next = self._document()
        self.saves += 1
        self._begin()

    async def written(self) -> None:
        """Returns when the state of the last :meth:`save` is kept; at once where there is nothing to write.

        Raises:
            SparserowError: it could not be kept; the next call tries again.
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
    """Takes note of a failure that no caller waits for; the next one that waits has another try."""
    if not writing.cancelled():
        writing.exception()
