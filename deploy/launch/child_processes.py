"""Processes of ours that a script has started: what they say first, and their end."""

from __future__ import annotations

import selectors
import subprocess
import time
from collections.abc import Sequence

from ...proto.errors import DeadlineExceeded


def first_line(process: subprocess.Popen[str], deadline: float, name: str) -> str:
    """The next line that a process says; empty when it has ended.

    Args:
        process: its stdout is a pipe of text.
        deadline: by ``time.monotonic()``.
        name: of the process, for the message.

    Raises:
        DeadlineExceeded: it said nothing in time.
    """
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded(f"{name}: was not ready in time")
    return process.stdout.readline()


def stop(processes: Sequence[subprocess.Popen[str]], deadline_sec: float) -> None:
    """Asks all of them to end, and kills those that do not within ``deadline_sec``."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(deadline_sec)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
