"""Sweeps by seconds rest while the clocks of a shard and its coordinator differ by more than an hour."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sparserow.ps_server.shard.coordinator_clock import CoordinatorClock
from sparserow.ps_server.shard.table_sweeps import TableSweeps

NOW = 1_700_000_000.0


class Store:
    """It notes whether each sweep went by seconds."""

    def __init__(self) -> None:
        self.by_seconds: list[bool] = []

    def sweep(self, _: int, *, by_seconds: bool, **__: Any) -> Any:
        self.by_seconds.append(by_seconds)
        return SimpleNamespace(freed=[])


class Clocks:
    """A shard's clock, which can be set, and a monotonic clock."""

    def __init__(self) -> None:
        self.unix, self.monotonic = NOW, 500.0
        self.coordinator = CoordinatorClock(lambda: self.unix, lambda: self.monotonic)

    def wait(self, sec: float) -> None:
        self.unix, self.monotonic = self.unix + sec, self.monotonic + sec


@pytest.mark.parametrize("ahead", [3700, -3700, 30 * 86400])
def test_sweeps_by_seconds_rest_while_the_clocks_differ(ahead: float, caplog: pytest.LogCaptureFixture) -> None:
    clocks, store = Clocks(), Store()
    sweeps = TableSweeps(store, SimpleNamespace(), None)
    sweeps.clock_difference_sec = clocks.coordinator.difference_sec
    sweeps.sweep(1)  # before the first heartbeat
    clocks.coordinator.heard(NOW)
    sweeps.sweep(1)
    with caplog.at_level(logging.INFO):
        clocks.unix += ahead  # between two heartbeats
        sweeps.sweep(1)
        clocks.wait(2)
        clocks.coordinator.heard(NOW + 2)
        sweeps.sweep(1, dry_run=True)
        clocks.unix -= ahead
        sweeps.sweep(1)
    assert store.by_seconds == [True, True, False, False, True]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert "the sweeps by seconds rest" in said[0]
    assert f"{abs(ahead) / 3600:.1f} h {'ahead of' if ahead > 0 else 'behind'}" in said[0]
    assert "go by seconds again" in said[1]


def test_clocks_that_differ_by_less_than_an_hour_are_trusted() -> None:
    clocks, store = Clocks(), Store()
    sweeps = TableSweeps(store, SimpleNamespace(), None)
    sweeps.clock_difference_sec = clocks.coordinator.difference_sec
    clocks.coordinator.heard(NOW - 3500)
    sweeps.sweep(1)
    clocks.coordinator.heard(0)  # an older coordinator
    clocks.unix += 7200
    sweeps.sweep(1)
    assert store.by_seconds == [True, True]
