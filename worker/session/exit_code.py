"""The exit code of a process that fails when everything of its own has run.

Python ends with code 120 when a standard stream cannot be flushed at the end (``sys.exit``); an error of an exit
handler changes no code. So the stream fails, and every other exit handler runs as it would.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from typing import Any


class ExitFailedError(Exception):
    """What the stream raises; the error itself was written before."""


class _Failing:
    """A standard stream whose last flush fails.

    Args:
        stream: the stream itself; None: the process has none.
    """

    closed = False  # else Python would not flush it

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """To the stream."""
        return len(text) if self._stream is None else int(self._stream.write(text))

    def flush(self) -> None:
        """Of the stream; raises when Python calls it last, so that handlers which flush are left alone.

        A child of multiprocessing never comes to that point: there each flush counts.
        """
        if self._stream is not None:
            with contextlib.suppress(ValueError):  # it is closed
                self._stream.flush()
        if sys.is_finalizing() or multiprocessing.parent_process() is not None:
            raise ExitFailedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def fail_at_exit() -> None:
    """Has this process, which is at its end, end with a code other than 0."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not ExitFailedError:
            before(unraisable)

    sys.unraisablehook = hook
    sys.stdout = _Failing(sys.stdout)
