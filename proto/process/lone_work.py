"""What this process is doing alone while its peers wait for it: its name, and how far it is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class LoneWork:
    """The lone work of a process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._progress = ""
        self._watches: list[Callable[[bool], None]] = []

    @property
    def words(self) -> str:
        """What is being done, such as ``statistics of the data: 1,200,000 samples``; empty when nothing is."""
        with self._lock:
            return f"{self._names[-1]}{': ' if self._progress else ''}{self._progress}" if self._names else ""

    def watch(self, notify: Callable[[bool], None]) -> None:
        """Calls ``notify`` with True when lone work begins, and with False when it has ended; at once if it is on."""
        with self._lock:
            self._watches.append(notify)
            if self._names:
                notify(True)

    def forget(self, notify: Callable[[bool], None]) -> None:
        """Calls ``notify`` no more."""
        with self._lock:
            self._watches.remove(notify)

    @contextlib.contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """Names the work of the block; blocks may be within each other."""
        with self._lock:
            self._names.append(name)
            self._progress = ""
            if len(self._names) == 1:
                for notify in self._watches:
                    notify(True)
        try:
            yield
        finally:
            with self._lock:
                self._names.pop()
                self._progress = ""
                if not self._names:
                    for notify in self._watches:
                        notify(False)

    def progress(self, text: str) -> None:
        """Says how far the work is, such as ``1,200,000 samples``; without effect when there is none."""
        with self._lock:
            self._progress = text if self._names else ""


lone_work = LoneWork()
