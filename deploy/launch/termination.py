"""Has SIGTERM end a command in the foreground as Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_by_termination() -> Iterator[None]:
    """Has SIGTERM raise KeyboardInterrupt in the block, so that folders and child processes of it end with it.

    After the first of SIGTERM and SIGINT another SIGTERM does nothing; another SIGINT interrupts what ends the block.
    It is for the main thread.
    """

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)
