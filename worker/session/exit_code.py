"""Makes a process that is already ending end with an exit code other than 0.

An error that an exit handler raises does not change the exit code. Python does end with code 120 when it cannot flush
a standard stream at the end (``sys.exit``). So this module makes that flush fail; every other exit handler still runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from typing import Any


class ExitFailedError(Exception):
    """Raised by the last flush of the stream. The error that it stands for was printed before."""


class _Failing:
    """A standard stream whose last flush fails.

    Args:
        stream: the stream that receives what is written; None: the process has no such stream.
    """

    closed = False  # Python flushes no stream that is closed

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes ``text`` to the stream; returns the number of characters written."""
        return len(text) if self._stream is None else int(self._stream.write(text))

    def flush(self) -> None:
        """Flushes the stream, and raises ExitFailedError in the flush that Python itself does last.

        Flushes of exit handlers before that point do not raise. A child of multiprocessing never reaches that point;
        there every flush raises.
        """
        if self._stream is not None:
            with contextlib.suppress(ValueError):  # the stream is closed
                self._stream.flush()
        if sys.is_finalizing() or multiprocessing.parent_process() is not None:
            raise ExitFailedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def fail_at_exit() -> None:
    """Makes this process, which is already ending, end with a code other than 0."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not ExitFailedError:
            before(unraisable)

    sys.unraisablehook = hook
    sys.stdout = _Failing(sys.stdout)
