"""Which pushes of the gateway's clients were applied: each numbered push is carried out once, in a task of its own.

The task belongs to the gateway and not to the call that brought the push: a client that gives up, or is cut off, takes
nothing with it, and its repeat of the number joins the task that runs. A window is forgotten ``FORGET_AFTER_SEC`` after
its last push ended, and never while a push of it runs or while it is not known whether its last push was applied.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...proto.errors import FailedPrecondition, ResourceExhausted, SparserowError, not_allowed

MOST_CLIENTS = 65_536
FORGET_AFTER_SEC = 3600.0


class ClientKey(NamedTuple):
    """A client of one namespace: names of two namespaces do not meet."""

    namespace: str
    client: str


@dataclass
class _Window:
    """What one client has pushed.

    Attributes:
        last: the number of its last push that was applied, or may have been; 0 before the first.
        is_known: whether it is known that ``last`` was applied.
        running: the push that runs, and its number.
        ended: time.monotonic() of the end of the last push.
    """

    last: int = 0
    is_known: bool = True
    running: tuple[int, asyncio.Task[None]] | None = None
    ended: float = 0.0

    def can_go(self, now: float) -> bool:
        return self.running is None and self.is_known and now - self.ended >= FORGET_AFTER_SEC


class PushWindows:
    """The windows of all clients. Belongs to one event loop.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: OrderedDict[ClientKey, _Window] = OrderedDict()  # the one whose push ended last is last

    def __len__(self) -> int:
        return len(self._windows)

    async def push(self, key: ClientKey, sequence: int, apply: Callable[[], Awaitable[None]]) -> bool:
        """Carries a push out, or joins the one of this number that runs.

        Args:
            key: whose number it is.
            sequence: the client's next number, or its last one again.
            apply: carries it out. An error whose ``may_be_applied`` is False leaves the number free.

        Returns:
            Whether the number had come before.

        Raises:
            InvalidArgument: the client has no name of 1 to 200 bytes, or the number is below 1.
            FailedPrecondition: the number is not the next one, or it is not known whether it was applied.
            ResourceExhausted: there are ``MOST_CLIENTS`` clients, none of which may be forgotten.
        """
        _check(key, sequence)
        window = self._windows.get(key)
        while window is not None and window.running is not None:
            number, task = window.running
            if number == sequence:
                await asyncio.shield(task)
                return True
            await asyncio.wait({task})  # its client gave it up; the task has the deadline of its calls
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
        """Waits until no push runs, at most so long."""
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
                sequence = window.last  # the number is free
                is_known = True
            raise
        finally:
            window.last, window.is_known, window.running = sequence, is_known, None
            window.ended = self._clock()
            if window.last == 0:
                del self._windows[key]
            else:
                self._windows.move_to_end(key)

    def _add(self, key: ClientKey) -> _Window:
        now = self._clock()
        while self._windows and self._windows[oldest := next(iter(self._windows))].can_go(now):
            del self._windows[oldest]
        if len(self._windows) >= MOST_CLIENTS:  # some behind one that has to stay
            for old in [key for key, window in self._windows.items() if window.can_go(now)]:
                del self._windows[old]
        if len(self._windows) >= MOST_CLIENTS:
            raise ResourceExhausted(
                f"client {key.client!r}: this gateway knows {MOST_CLIENTS} clients that pushed within the last "
                f"{FORGET_AFTER_SEC:.0f} s; try again later, or let programs keep their names"
            )
        window = self._windows[key] = _Window()
        return window


def _check(key: ClientKey, sequence: int) -> None:
    if not 1 <= len(key.client.encode()) <= 200:
        raise not_allowed("client", key.client, "1 to 200 bytes")
    if sequence < 1:
        raise not_allowed("sequence", sequence, "1, 2, 3, ...")


def _note_error(task: asyncio.Task[None]) -> None:
    """Marks the error as seen, since the task may have no awaiting call any more."""
    if not task.cancelled():
        task.exception()


def _is_repeated(key: ClientKey, sequence: int, window: _Window) -> bool:
    """Whether this number was applied before; raises when it may not come now."""
    what = f"client {key.client!r}: sequence {sequence}"
    if sequence == window.last:
        if not window.is_known:
            raise FailedPrecondition(f"{what}: it is not known whether it was applied; go on with the next one")
        return True
    if sequence == window.last + 1:
        return False
    raise FailedPrecondition(f"{what} is not allowed; allowed: {window.last} again, or {window.last + 1}")
