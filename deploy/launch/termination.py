"""Has SIGTERM end a command in the foreground as Ctrl-C does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


def end_as_first_process() -> None:
    """Has SIGTERM end this process where it is process 1, as in a container: the kernel drops signals without a handler
    there. The handler raises KeyboardInterrupt. A process that is not the first keeps the default action, by which it
    ends within calls that Python does not see the end of.
    """
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


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
