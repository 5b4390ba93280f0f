"""What is lost counts once, over the processes of a shard and over a restart of the coordinator."""

from __future__ import annotations

import json
import random

import pytest

from sparserow.ps_server.coordinator.state import lost_commits
from sparserow.ps_server.coordinator.state.lost_commits import CommitOwner, LostCommits

KEYS = CommitOwner(1, 7, 0, 1, is_steps=False)


def test_ranges_that_overlap_or_touch_are_one() -> None:
    lost = LostCommits()
    assert lost.add(KEYS, 10, 19) == 10
    assert lost.add(KEYS, 15, 24) == 5
    assert lost.add(KEYS, 40, 49) == 10
    assert lost.add(KEYS, 25, 39) == 15
    assert lost.add(KEYS, 10, 49) == 0
    assert lost.add(KEYS._replace(is_steps=True), 10, 19) == 10
    assert lost.add(KEYS._replace(shard=0), 10, 19) == 10
    assert (lost.count(0), lost.count(1), lost.count(2)) == (10, 50, 0)


def test_random_ranges_against_a_set() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    lost, expected = LostCommits(), set()
    for _ in range(3000):
        first = chance.randrange(4000)
        last = first + chance.randrange(9)
        new = set(range(first, last + 1)) - expected
        expected |= new
        assert lost.add(KEYS, first, last) == len(new)
    assert lost.count(1) == len(expected)
    again = LostCommits.of_document(json.loads(json.dumps(lost.to_document())))
    assert again.count(1) == len(expected)
    assert again.add(KEYS, 0, 4100) == 4101 - len(expected)


def test_ranges_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_commits, "MOST_RANGES", 3)
    lost = LostCommits()
    assert [lost.add(KEYS, 10 * i, 10 * i + 1) for i in range(5)] == [2, 2, 2, 0, 0]
    assert lost.add(KEYS, 2, 9) == 8  # joins two that are there
    assert lost.count(1) == 14
    assert lost.add(KEYS._replace(job_id=8), 0, 0) == 1
