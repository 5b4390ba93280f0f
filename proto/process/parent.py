"""Ends a server process with the process that started it, however that process ends.

There are two ways, because each has a gap. The kernel's parent-death signal follows the parent's *thread*, so only a
parent that starts children from its main thread asks for it. The watch follows the parent process, and needs a running
event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
WATCH_SEC = 1.0


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends; exits when that thread has ended
    already.

    Args:
        parent_pid: the id of the process that started this one, as that process knew it.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


async def watch_parent(parent_pid: int, on_end: Callable[[], None]) -> None:
    """Calls ``on_end`` once ``parent_pid`` is no longer the parent of this process."""
    while os.getppid() == parent_pid:
        await asyncio.sleep(WATCH_SEC)
    on_end()
