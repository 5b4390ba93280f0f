"""Calls a function periodically from a thread of its own, until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable

_STOP_DEADLINE_SEC = 10.0


class PeriodicThread:
    """A thread that makes ``call`` every ``every_sec`` seconds, counted from the end of a call to the next one.

    Args:
        call: the function to call; it must not raise.
        every_sec: the pause between two calls, in seconds; None never calls it.
        name: the name of the thread, in logs and debuggers.
    """

    def __init__(self, call: Callable[[], None], every_sec: float | None, *, name: str) -> None:
        self._call = call
        self._every_sec = every_sec
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if every_sec is not None:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stops the thread after the call under way; the call is harmless when it has stopped."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_DEADLINE_SEC)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_sec):
            self._call()
