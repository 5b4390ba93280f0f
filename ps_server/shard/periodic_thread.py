"""Calls something again and again from a thread of its own, until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable

_STOP_DEADLINE_SEC = 10.0


class PeriodicThread:
    """Runs ``sweep`` every ``every_sec`` seconds, counted from the end of one to the start of the next.

    Args:
        sweep: what is called; it must not raise.
        every_sec: None: never.
    """

    def __init__(self, sweep: Callable[[], None], every_sec: float | None) -> None:
        self._sweep = sweep
        self._every_sec = every_sec
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if every_sec is not None:
            self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends it, once the call under way is done; harmless when it has ended."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_DEADLINE_SEC)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_sec):
            self._sweep()
