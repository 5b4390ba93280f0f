"""Settings of a process that starts: when garbage is collected, and what SIGTERM does to the first of a container."""

from __future__ import annotations

import gc
import os
import signal

_MADE_MEANWHILE = 50_000  # objects that are made between two collections while a process starts; later it is 700

_former: list[tuple[int, int, int]] = []  # the thresholds to which a process returns once it has started


def begin_start() -> None:
    """Lets the process that starts make 50,000 objects between two collections, until :func:`end_start`.

    Imports make no garbage, and a process that imports torch spends a sixth of its start on looking for it.
    """
    if not _former:
        _former.append(gc.get_threshold())
        gc.set_threshold(_MADE_MEANWHILE, *_former[0][1:])


def end_start() -> None:
    """Takes the objects that this process has made out of all later collections, and collects as usual from now on.

    A collection of all objects takes 5 ms in a shard, and 50 ms with torch: the cut of a save, a push or a step of
    training would wait for it. Objects that are spared still go with their last reference; a cycle of them stays. So
    the function does nothing in a process that did not begin with :func:`begin_start`, such as a user's own.
    """
    if not _former:
        return
    gc.set_threshold(*_former.pop())
    gc.collect()
    gc.freeze()


def end_as_first_process() -> None:
    """Has SIGTERM end this process where it is process 1, as in a container: the kernel drops signals without a handler
    there. The handler raises KeyboardInterrupt. A process that is not the first keeps the default action, by which it
    ends within calls that Python does not see the end of.
    """
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
