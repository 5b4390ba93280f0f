"""Waits for changes of a store's rows, for all followers of a shard at once."""

from __future__ import annotations

import asyncio
import contextlib
import os

from ...cpp_ext import _server


class ChangeWatch:
    """Wakes those who wait when a row of a followed table changes. An object belongs to one event loop.

    Args:
        store: the store.
    """

    def __init__(self, store: _server.Store) -> None:
        self.store = store
        self._descriptor = os.dup(store.change_signal())  # which stays this object's when the store is gone
        self._next: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._on_change)

    def armed(self) -> asyncio.Future[None]:
        """Returns what is done at the next change; call it before the look that finds none."""
        if self._next is None or self._next.done():
            self._next = self._loop.create_future()
            self.store.arm_change_signal()
        return self._next

    async def wait(self, changed: asyncio.Future[None], seconds: float) -> None:
        """Waits for a change, at most so long."""
        await asyncio.wait((changed,), timeout=seconds)

    def close(self) -> None:
        """Watches no further."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _on_change(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 8)
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
