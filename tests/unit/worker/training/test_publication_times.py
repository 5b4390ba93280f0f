"""When a run publishes while it goes on, by the clock and by the times of events."""

from __future__ import annotations

import time

import pytest

from sparserow.proto.config.publish_config import PublishConfig
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.publication_times import PublicationTimes

MINUTE = 60_000_000


class Clock:
    """The clock of the process, and the watermark."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.watermark = 1_000.0, None
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    watermark: int | None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def times(clock: Clock, rank: int = 0, **options: object) -> PublicationTimes:
    config = PublishConfig.model_validate({"root": "m", **options})
    return PublicationTimes(config, WorkerGroup(rank, 2), lambda: clock.watermark)


def test_by_the_clock_it_counts_from_the_end_of_the_last_one(clock: Clock) -> None:
    it = times(clock, every="60s")
    assert it.is_asked
    assert not it.is_due
    clock.now += 61
    assert it.is_due
    assert not times(clock, rank=1, every="60s").is_due
    clock.now += 30  # of the publication
    it.restart()
    clock.now += 59
    assert not it.is_due
    clock.now += 1
    assert it.is_due


def test_by_event_time_a_version_is_due_at_each_multiple(clock: Clock) -> None:
    it = times(clock, every="10min", by="event_time", least_pause="30s")
    clock.now += 100
    assert not it.is_due  # the watermark is not known
    clock.watermark = 25 * MINUTE
    assert not it.is_due
    clock.watermark = 29 * MINUTE
    assert not it.is_due
    clock.watermark = 30 * MINUTE
    assert it.is_due
    it.restart()
    assert not it.is_due
    clock.watermark = 49 * MINUTE  # past 40
    clock.now += 29
    assert not it.is_due
    clock.now += 1
    assert it.is_due
    it.restart()
    clock.now += 100
    assert not it.is_due
    clock.watermark = 50 * MINUTE
    assert it.is_due


def test_nothing_is_due_where_the_job_does_not_ask(clock: Clock) -> None:
    it = times(clock)
    clock.now += 1e9
    assert not it.is_asked
    assert not it.is_due
