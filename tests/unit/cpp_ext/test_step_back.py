"""A thread that steps back: its niceness and its slices, and nobody else's."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

import pytest

from sparserow.cpp_ext import _server

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}  # the number of the system call
SLICE_NANOSECONDS = 100_000


class SchedAttr(ctypes.Structure):
    """The kernel's sched_attr of 48 bytes."""

    _fields_ = (
        ("bytes", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def schedule_of_this_thread() -> SchedAttr:
    attr = SchedAttr()
    libc = ctypes.CDLL(None, use_errno=True)
    number = SCHED_GETATTR[platform.machine()]
    assert libc.syscall(number, 0, ctypes.byref(attr), ctypes.sizeof(attr), 0) == 0, os.strerror(ctypes.get_errno())
    return attr


def stepped_back(*nice: int) -> tuple[int, SchedAttr]:
    """Returns the niceness and the schedule of a thread that stepped back by each of ``nice``."""
    seen: list[tuple[int, SchedAttr]] = []

    def run() -> None:
        for each in nice:
            _server.step_back(each)
        seen.append((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), schedule_of_this_thread()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.skipif(platform.machine() not in SCHED_GETATTR, reason="the number of sched_getattr is not known here")
def test_a_thread_has_more_niceness_and_shorter_slices_and_others_keep_theirs() -> None:
    mine = schedule_of_this_thread()
    nice, schedule = stepped_back(7)
    assert nice == schedule.nice == min(19, mine.nice + 7)
    if (mine.runtime, mine.policy) != (0, os.SCHED_OTHER):  # the kernel tells the slice: Linux 6.12 and newer
        assert schedule.runtime == SLICE_NANOSECONDS
    now = schedule_of_this_thread()
    assert (now.nice, now.runtime) == (mine.nice, mine.runtime)


def test_a_thread_that_steps_back_again_has_the_last_niceness_of_at_most_19() -> None:
    mine = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert stepped_back(3, 3, 3)[0] == min(19, mine + 3)
    assert stepped_back(3, 19)[0] == 19
