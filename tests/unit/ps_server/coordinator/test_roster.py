"""Decisions about a job's workers from the reports of its shards."""

from __future__ import annotations

import pytest

from sparserow.ps_server.coordinator.state.membership import Ticket
from sparserow.ps_server.coordinator.state.roster import CommitWindow, Roster, WorkerKey

ZERO, ONE = Ticket(1, 0, 10, 1), Ticket(1, 1, 11, 1)
KEYS: list[WorkerKey] = [(10, 1), (11, 1)]


def of(staleness: int | None) -> Roster:
    roster = Roster("ads/ctr", staleness, 1)
    roster.decide(1, [], [{}, {}], [ZERO, ONE])
    return roster


def reports(*shards: tuple[tuple[int, int], tuple[int, int]]) -> list[dict[WorkerKey, CommitWindow]]:
    """For each shard (sequence, step) of both workers."""
    return [{key: CommitWindow(*window) for key, window in zip(KEYS, shard, strict=True)} for shard in shards]


def test_a_job_begins_at_step_0() -> None:
    roster = of(0)
    assert [(span.key, span.first_step, span.until_step) for span in roster.spans.values()] == [
        (KEYS[0], 0, None),
        (KEYS[1], 0, None),
    ]
    assert roster.operation == 1
    assert roster.gone([ZERO, ONE]) == []
    assert roster.gone([ZERO]) == [KEYS[1]]


@pytest.mark.parametrize(("staleness", "until"), [(0, 6), (2, 8), (None, 8)])
def test_who_dies_counts_as_far_as_any_shard_knows(staleness: int | None, until: int) -> None:
    roster = of(staleness)
    # Its last commit, sequence 9 of step 6, is on one shard only; the other worker is at step 8.
    roster.decide(2, [KEYS[1]], reports(((20, 8), (8, 5)), ((20, 8), (9, 6))), [ZERO])
    span = roster.spans[KEYS[1]]
    assert (span.until_step, span.final_sequence) == (until, 9)
    assert roster.spans[KEYS[0]].until_step is None


def test_who_never_committed_counts_for_no_step_of_a_synchronous_job() -> None:
    roster = of(0)
    roster.decide(2, [KEYS[1]], reports(((1, 0), (0, -1)), ((1, 0), (0, -1))), [ZERO])
    assert all(span.until_step is None for span in roster.spans.values())  # and is forgotten


def test_who_comes_counts_after_the_highest_step_taken_anywhere() -> None:
    roster = of(None)
    again = Ticket(1, 1, 11, 2)
    roster.decide(2, [KEYS[1]], reports(((5, 4), (3, 2)), ((6, 5), (3, 2))), [ZERO, again])
    assert roster.spans[11, 2].first_step == 6
    assert roster.spans[KEYS[1]].until_step == 5


def test_who_left_is_remembered_until_all_have_passed_its_last_step() -> None:
    roster = of(3)
    roster.decide(2, [KEYS[1]], reports(((5, 4), (7, 6)), ((5, 4), (7, 6))), [ZERO])
    assert KEYS[1] in roster.spans
    roster.decide(3, [], reports(((8, 7), (7, 6)), ((7, 6), (7, 6))), [ZERO])
    assert KEYS[1] in roster.spans  # one shard still waits for step 7 of the other
    roster.decide(4, [], reports(((8, 7), (7, 6)), ((8, 7), (7, 6))), [ZERO])
    assert list(roster.spans) == [KEYS[0]]


def test_the_last_ones_stay_until_the_job_is_dropped() -> None:
    roster = of(0)
    roster.decide(2, KEYS, reports(((1, 0), (1, 0)), ((1, 0), (0, -1))), [])
    assert [span.final_sequence for span in roster.spans.values()] == [1, 1]
    roster.begin_generation(2, "ads/ctr", None)
    assert roster.spans == {}
    assert roster.generation == 2
