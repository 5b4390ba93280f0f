"""Lets the calls of a program run together, and a change of what they use only while none of them runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CallGate:
    """A gate between calls and changes. Thread-safe; a thread within a call must make no change, and no second call."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._calls = 0
        self._is_changing = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Holds changes off for the duration of its block; it waits first for a change that has begun."""
        with self._state:
            self._state.wait_for(lambda: not self._is_changing)
            self._calls += 1
        try:
            yield
        finally:
            with self._state:
                self._calls -= 1
                self._state.notify_all()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Holds new calls off for the duration of its block, and waits first for those under way."""
        with self._state:
            self._state.wait_for(lambda: not self._is_changing)
            self._is_changing = True
            try:
                self._state.wait_for(lambda: not self._calls)
            except BaseException:
                self._is_changing = False
                self._state.notify_all()
                raise
        try:
            yield
        finally:
            with self._state:
                self._is_changing = False
                self._state.notify_all()
