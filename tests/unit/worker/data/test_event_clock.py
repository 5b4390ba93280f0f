"""What the times of a stream's events say: watermarks are in tests/unit/ps_server/coordinator/test_stream_leases.py."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from sparserow.worker.data.decoded import Lines
from sparserow.worker.data.event_clock import EventClock, EventTimes
from sparserow.worker.data.events import DeadEvent, PartEvents

SECOND = 1_000_000
NOW = int(time.time()) * SECOND


def piece(part: str, *times: int) -> PartEvents:
    count = len(times)
    lines = Lines(
        np.zeros((count, 1)),
        np.zeros((count, 0), np.int64),
        np.zeros(count, np.float32),
        times=np.array(times, np.int64),
    )
    there, ends = np.ones(count, np.bool_), np.arange(1, count + 1)
    return PartEvents(part, lines, there, ends, lambda at, reason: DeadEvent(f"{part}@{at}", reason))


def clock(**options: float) -> EventClock:
    return EventClock(**{"max_ahead": 60.0, "idle_after": 30.0, "max_skew": None, **options})


def test_events_before_the_watermark_are_late() -> None:
    it = clock()
    some = piece("a/0", NOW - 50 * SECOND, NOW - 10 * SECOND, NOW - 30 * SECOND)
    assert it.times_of(some) == EventTimes(NOW - 10 * SECOND, 0, 0)
    it.watermark = NOW - 30 * SECOND
    assert it.times_of(some) == EventTimes(NOW - 10 * SECOND, 1, 0)


def test_a_time_far_ahead_of_the_clock_moves_nothing() -> None:
    it = clock(max_ahead=60.0)
    far, near = NOW + 7200 * SECOND, NOW + 5 * SECOND
    assert it.times_of(piece("a/0", near, far)) == EventTimes(near, 0, 1)
    assert it.times_of(piece("a/0", far)) == EventTimes(None, 0, 1)
    assert it.times_of(piece("a/0")) == EventTimes()
    without = piece("a/0", near)
    without.lines = replace(without.lines, times=None)
    assert it.times_of(without) == EventTimes()


def test_a_part_waits_while_it_is_ahead_of_the_others() -> None:
    it = clock(max_skew=100.0)
    for part in ("a/0", "a/1"):
        it.open(part)
    it.note(piece("a/0", 150 * SECOND))
    it.note(piece("a/1", 20 * SECOND))
    it.note(piece("b/0", 900 * SECOND))  # which is not open
    assert it.waiting() == ()
    it.watermark = 20 * SECOND
    assert it.waiting() == ["a/0"]
    it.watermark = 50 * SECOND
    assert it.waiting() == []
    it.note(piece("a/0", 900 * SECOND))
    assert it.waiting() == ["a/0"]
    it.close("a/0")
    assert it.waiting() == []
    assert clock().waiting() == ()


def test_a_part_without_events_is_idle_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    it, now = clock(idle_after=30.0), time.monotonic()
    for part in ("a/0", "a/1", "a/2"):
        it.open(part)
    assert it.idle({}) == []
    monkeypatch.setattr(time, "monotonic", lambda: now + 25.0)
    it.note(piece("a/1", NOW))
    monkeypatch.setattr(time, "monotonic", lambda: now + 35.0)
    assert it.idle({"a/0": 0}) == ["a/0", "a/2"]
    assert it.idle({"a/2": 7}) == ["a/0"]  # its broker does not answer, or it waits for others
