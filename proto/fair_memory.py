"""The memory that requests and replies of a process take, shared fairly between clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

from .errors import Unavailable

_WAIT_SEC = 5.0


class FairMemory:
    """A budget in bytes. Belongs to one event loop.

    A client gets at most as much as stays free for others, so that a newcomer always finds room: one client alone gets
    half of the budget, each of two a third.

    Args:
        total: of all clients, in bytes.
        wait_sec: how long a request waits for its turn; requests that fit are let in by the order of their coming.
    """

    def __init__(self, total: int, wait_sec: float = _WAIT_SEC) -> None:
        self._free = total
        self._wait_sec = wait_sec
        self._taken: Counter[str] = Counter()
        self._waiting: deque[tuple[str, int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def charged(self, client: str, count: int) -> AsyncIterator[None]:
        """Charges ``count`` bytes to a client for the duration of the block.

        Raises:
            Unavailable: there was no room for so long.
        """
        await self.take(client, count)
        try:
            yield
        finally:
            self.give_back(client, count)

    async def take(self, client: str, count: int) -> None:
        """Charges ``count`` bytes to a client until :meth:`give_back`; raises as :meth:`charged`."""
        if self._fits(client, count):
            self._charge(client, count)
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (client, count, turn)
        self._waiting.append(entry)
        try:
            await asyncio.wait_for(asyncio.shield(turn), self._wait_sec)
        except BaseException as error:
            if turn.done():
                self.give_back(client, count)
            else:
                self._waiting.remove(entry)
            if isinstance(error, asyncio.TimeoutError):
                raise Unavailable("too many requests at once; try again later") from None
            raise

    def _fits(self, client: str, count: int) -> bool:
        return self._taken[client] + count <= self._free - count

    def _charge(self, client: str, count: int) -> None:
        self._taken[client] += count
        self._free -= count

    def give_back(self, client: str, count: int) -> None:
        """Ends a charge."""
        self._free += count
        self._taken[client] -= count
        if not self._taken[client]:
            del self._taken[client]
        for entry in list(self._waiting):
            waiting, wanted, turn = entry
            if self._fits(waiting, wanted):
                self._waiting.remove(entry)
                self._charge(waiting, wanted)
                turn.set_result(None)
