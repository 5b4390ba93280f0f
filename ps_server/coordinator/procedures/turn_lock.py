"""A lock that namespaces get in turn, so that one with many calls does not hold up the others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class TurnLock:
    """A lock of one event loop, which each waiting namespace gets once before one gets it again.

    As a context manager it is taken for the whole cluster, which counts as a namespace of its own.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next namespace is the first

    async def acquire(self, namespace: str) -> None:
        """Takes the lock for a namespace, when it is its turn."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # it was given already
            raise

    def release(self) -> None:
        """Gives the lock to the next caller that waits."""
        while self._waiting:
            namespace, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[namespace] = turns  # behind the others
            if not turn.done():  # cancelled otherwise
                turn.set_result(None)
                return
        self._is_taken = False

    async def __aenter__(self) -> None:
        await self.acquire("")

    async def __aexit__(self, *_: object) -> None:
        self.release()
