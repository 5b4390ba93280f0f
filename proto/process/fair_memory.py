"""A budget for the memory of a process's requests and replies, shared fairly between its clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

from ..errors import Unavailable

_WAIT_SEC = 5.0


class FairMemory:
    """A budget in bytes that clients share. It belongs to one event loop.

    A client is never charged more than what is still free, so that a new client always finds room. One client alone
    gets half of the budget; each of two gets a third.

    Args:
        total: the budget of all clients together, in bytes.
        wait_sec: how long a request waits for room; waiting requests that fit are let in by order of arrival.
    """

    def __init__(self, total: int, wait_sec: float = _WAIT_SEC) -> None:
        self._free = total
        self._wait_sec = wait_sec
        self._taken: Counter[str] = Counter()
        self._waiting: deque[tuple[str, int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def charged(self, client: str, count: int) -> AsyncIterator[None]:
        """Charges ``count`` bytes to a client for the duration of the block.

        Args:
            client: the name of the account to charge.
            count: the number of bytes.

        Raises:
            Unavailable: no room became free within ``wait_sec``.
        """
        await self.take(client, count)
        try:
            yield
        finally:
            self.give_back(client, count)

    async def take(self, client: str, count: int) -> None:
        """Charges ``count`` bytes to a client until :meth:`give_back`; it raises as :meth:`charged` does."""
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
                raise Unavailable("the memory for requests is in use by other requests; try again later") from None
            raise

    def _fits(self, client: str, count: int) -> bool:
        return self._taken[client] + count <= self._free - count

    def _charge(self, client: str, count: int) -> None:
        self._taken[client] += count
        self._free -= count

    def give_back(self, client: str, count: int) -> None:
        """Ends a charge of ``count`` bytes and lets waiting requests in that fit now."""
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
