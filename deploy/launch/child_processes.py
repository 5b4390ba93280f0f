"""Child processes of a script: their first line of output, and their end."""

from __future__ import annotations

import selectors
import subprocess
import time
from collections.abc import Sequence

from ...proto.errors import DeadlineExceeded


def first_line(process: subprocess.Popen[str], deadline: float, name: str) -> str:
    """Returns the next line of a process's output; empty when the process has ended.

    Args:
        process: the process, whose stdout is a pipe of text.
        deadline: the latest time for a line, by ``time.monotonic()``.
        name: the name of the process, for an error message.

    Raises:
        DeadlineExceeded: the process wrote no line in time.
    """
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded(f"{name}: the process was not ready in time")
    return process.stdout.readline()


def stop(processes: Sequence[subprocess.Popen[str]], deadline_sec: float) -> None:
    """Asks all processes to end, and kills those that do not end within ``deadline_sec`` seconds."""
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
