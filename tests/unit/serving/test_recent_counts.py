"""Counts of the last minutes forget what is older, however long nobody asks."""

from __future__ import annotations

import numpy as np

from sparserow.serving.recent_counts import RecentCounts


def test_what_is_older_than_two_parts_is_forgotten() -> None:
    now = 100.0
    recent = RecentCounts(3, part_sec=60.0, clock=lambda: now)
    recent.add([1, 0, 0])
    now += 59
    recent.add([0, 1, 0])
    assert recent.counts() == [1, 1, 0]
    now += 1
    recent.add([0, 0, 1])
    assert recent.counts() == [1, 1, 1]
    now += 60
    assert recent.counts() == [0, 0, 1]
    now += 1e6
    assert recent.counts() == [0, 0, 0]
    recent.add([5, 0, 0])
    assert recent.counts() == [5, 0, 0]


def test_nothing_younger_than_a_part_is_lost() -> None:
    seed = 20261201
    print("seed", seed)
    random = np.random.default_rng(seed)
    now, added = 0.0, []
    recent = RecentCounts(1, part_sec=60.0, clock=lambda: now)
    for _ in range(500):
        now += float(random.exponential(30))
        count = int(random.integers(5))
        recent.add([count])
        added.append((now, count))
        young = sum(each for at, each in added if now - at <= 60)
        possible = sum(each for at, each in added if now - at <= 120)
        assert young <= recent.counts()[0] <= possible
