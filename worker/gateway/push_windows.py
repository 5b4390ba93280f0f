"""Applies each numbered push of the gateway's clients once, in a task of its own.

The task belongs to the gateway, not to the call that brought the push. When a client gives up or loses its connection,
the task goes on, and a repeat of the number joins the running task. A client's window is removed ``FORGET_AFTER_SEC``
after its last push has ended. It stays while a push runs, and while it is unknown whether the last push was applied.

Namespaces share the windows: one never has more than are still free, so that clients of another find one. Of
``MOST_CLIENTS`` one namespace alone gets half, and each of two gets a third.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...proto.errors import FailedPrecondition, ResourceExhausted, SparserowError, not_allowed

MOST_CLIENTS = 65_536
FORGET_AFTER_SEC = 3600.0
_LOOK_SEC = 1.0  # between two looks at all windows


class ClientKey(NamedTuple):
    """A client in one namespace; clients of two namespaces are different, even with the same name."""

    namespace: str
    client: str


@dataclass
class _Window:
    """The state of one client's pushes.

    Attributes:
        last: the number of its last push that was applied or may have been; 0 before the first.
        is_known: whether it is known that ``last`` was applied.
        running: the number and the task of the running push; None: no push runs.
        ended: the time at which the last push ended, from ``time.monotonic()``.
    """

    last: int = 0
    is_known: bool = True
    running: tuple[int, asyncio.Task[None]] | None = None
    ended: float = 0.0

    def can_go(self, now: float) -> bool:
        return self.running is None and self.is_known and now - self.ended >= FORGET_AFTER_SEC


class PushWindows:
    """The windows of all clients. It belongs to one event loop.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: OrderedDict[ClientKey, _Window] = OrderedDict()  # in the order in which last pushes ended
        self._counts: Counter[str] = Counter()  # of windows, by namespace
        self._looked_at = -math.inf

    def __len__(self) -> int:
        return len(self._windows)

    async def push(self, key: ClientKey, sequence: int, apply: Callable[[], Awaitable[None]]) -> bool:
        """Applies a push, or joins the running push of the same number.

        Args:
            key: the client.
            sequence: the client's next number, or its last one again.
            apply: applies the push. After an error whose ``may_be_applied`` is False, the number can be used again.

        Returns:
            Whether a push of this number came before.

        Raises:
            InvalidArgument: the client's name does not have 1 to 200 bytes, or the number is below 1.
            FailedPrecondition: the number is not the next one, or it is not known whether its push was applied.
            ResourceExhausted: the namespace has as many clients as are free for others, and no window may be removed.
        """
        _check(key, sequence)
        window = self._windows.get(key)
        while window is not None and window.running is not None:
            number, task = window.running
            if number == sequence:
                await asyncio.shield(task)
                return True
            await asyncio.wait({task})  # the client gave up that push; the deadlines of its calls bound the task
            window = self._windows.get(key)
        if window is not None and _is_repeated(key, sequence, window):
            return True
        if window is None:
            if sequence != 1:
                raise FailedPrecondition(
                    f"client {key.client!r}: sequence {sequence} is not the first, and this gateway does not know the "
                    "client: was it restarted? Begin with 1 under another name"
                )
            window = self._add(key)
        task = asyncio.create_task(self._run(key, window, sequence, apply))
        task.add_done_callback(_note_error)
        window.running = (sequence, task)
        await asyncio.shield(task)
        return False

    async def drain(self, timeout_sec: float) -> None:
        """Waits until no push runs, but at most ``timeout_sec`` seconds."""
        tasks = [window.running[1] for window in self._windows.values() if window.running is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_sec)

    async def _run(self, key: ClientKey, window: _Window, sequence: int, apply: Callable[[], Awaitable[None]]) -> None:
        is_known = False
        try:
            await apply()
            is_known = True
        except SparserowError as error:
            if not error.may_be_applied:
                sequence = window.last  # so that the number can be used again
                is_known = True
            raise
        finally:
            window.last, window.is_known, window.running = sequence, is_known, None
            window.ended = self._clock()
            if window.last == 0:
                self._remove(key)
            else:
                self._windows.move_to_end(key)

    def _add(self, key: ClientKey) -> _Window:
        now = self._clock()
        while self._windows and self._windows[oldest := next(iter(self._windows))].can_go(now):
            self._remove(oldest)
        if not self._has_room(key.namespace) and now - self._looked_at >= _LOOK_SEC:
            self._looked_at = now
            # Windows after one that must stay may be removable.
            for old in [key for key, window in self._windows.items() if window.can_go(now)]:
                self._remove(old)
        if not self._has_room(key.namespace):
            raise ResourceExhausted(
                f"client {key.client!r}: this gateway knows {self._counts[key.namespace]} clients of namespace "
                f"{key.namespace!r} that pushed within the last {FORGET_AFTER_SEC:.0f} s, and keeps the "
                f"{MOST_CLIENTS - len(self._windows)} free places for others; try again later, or let programs keep "
                "their names"
            )
        window = self._windows[key] = _Window()
        self._counts[key.namespace] += 1
        return window

    def _has_room(self, namespace: str) -> bool:
        return self._counts[namespace] < MOST_CLIENTS - len(self._windows)

    def _remove(self, key: ClientKey) -> None:
        del self._windows[key]
        self._counts[key.namespace] -= 1
        if not self._counts[key.namespace]:
            del self._counts[key.namespace]


def _check(key: ClientKey, sequence: int) -> None:
    if not 1 <= len(key.client.encode()) <= 200:
        raise not_allowed("client", key.client, "1 to 200 bytes")
    if sequence < 1:
        raise not_allowed("sequence", sequence, "1, 2, 3, ...")


def _note_error(task: asyncio.Task[None]) -> None:
    """Marks the task's error as retrieved, since no call may be waiting for the task any more."""
    if not task.cancelled():
        task.exception()


def _is_repeated(key: ClientKey, sequence: int, window: _Window) -> bool:
    """Returns whether a push of this number was applied before.

    Raises:
        FailedPrecondition: the number is not the next one, or it is not known whether its push was applied.
    """
    what = f"client {key.client!r}: sequence {sequence}"
    if sequence == window.last:
        if not window.is_known:
            raise FailedPrecondition(f"{what}: it is not known whether it was applied; go on with the next one")
        return True
    if sequence == window.last + 1:
        return False
    raise FailedPrecondition(f"{what} is not allowed; allowed: {window.last} again, or {window.last + 1}")
