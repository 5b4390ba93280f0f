"""The consistency protocol under random schedules, and the checker under planted bugs.

SPARSEROW_TEST_FULL=1 plays 100,000 schedules; SPARSEROW_TEST_SEED=N starts at another seed. A failure prints the seed
and a schedule from which no event can be dropped.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
from schedule import fault, random_schedule, run, shrink

from long_form import FULL

FIRST_SEED = int(os.environ.get("SPARSEROW_TEST_SEED", "0"))
SCHEDULES = 100_000 if FULL else 3_000
PARTS = 10

# Planted bug -> (profile that meets it soonest or None, schedules within which the checker must find it, from which
# seed: not 0 only where the schedules before it are known not to meet the bug).
PLANTED: dict[str, tuple[str | None, int, int]] = {
    "abandoned_delta": ("late follower", 4_000, 0),  # a follower takes rows of a branch that a restore abandoned
    "abort_after_commit": (None, 200, 0),  # a worker in doubt about COMMIT aborts and tries the step again
    "abort_forgotten": ("late", 2_000, 0),  # a late PREPARE of an aborted sequence is held again
    "arrival_order": (None, 200, 0),  # a step reduced in the order of arrival
    "bound_off_by_one": (None, 200, 0),
    "conditional_newer": (None, 500, 0),  # a conditional pull compares versions with > instead of !=
    "cut_answered_late": ("shards", 400, 14_400),  # a repeated answer of a cut carries the window of now
    "cut_window_split": ("shards", 2_000, 0),  # the window is saved later than the rows
    "decide_early": (None, 1_000, 0),  # COMMIT before every shard has prepared
    "dedup_off": (None, 200, 0),
    "dirty_before_ack": (None, 2_000, 0),  # ring entries removed when sent
    "epochs_begin_anew": ("forgotten", 2_000, 0),  # a worker that was forgotten is counted from 1 again
    "fenced_before_seen": ("leases", 2_000, 0),  # a fenced worker is refused before the window is asked
    "fenced_while_deciding": ("leases", 4_000, 0),  # it is refused while RESOLVE may still apply what it prepared
    "in_doubt_dropped": ("leases", 3_000, 0),  # a dead worker's half-delivered COMMIT is not finished
    "lineage_not_raised": ("restores", 2_000, 0),
    "lost_abort": (None, 2_000, 0),  # ABORT is sent once, its answer not awaited
    "no_fencing": ("leases", 2_000, 0),
    "no_generation": (None, 500, 0),  # a late FREEZE or RESOLVE is obeyed
    "no_hold": (None, 3_000, 0),  # members and cuts change while commits go on
    "no_incarnation": ("late follower", 4_000, 0),  # a restarted shard obeys what was decided for the process before
    "outside_commits": (
        "quorum",
        500,
        0,
    ),  # a worker outside of a step sends its COMMIT to the other shards all the same
    "prepare_acks_kept": (None, 2_000, 0),  # PREPARE acknowledged by a shard that was restored since
    "quorum_of_each_shard": ("quorum", 500, 0),  # each shard takes the first COMMITs that it gets
    "quorum_of_the_living": ("quorum of mortals", 4_000, 0),  # a step needs as many as live now, not as count for it
    "replay_dropped": ("restores", 2_000, 0),  # nothing is replayed to a restored shard
    "replay_unordered": ("restores", 3_000, 0),  # replayed, but not in order of sequence
    "restore_keeps_route": ("restores", 2_000, 0),
    "rollback_keeps_epochs": (None, 500, 0),
    "sequence_reused": (None, 500, 0),  # the try after an abort carries the same sequence
    "window_forgets_epoch": (None, 2_000, 0),  # the window is one number per worker id
}


@pytest.mark.parametrize("part", range(PARTS))
def test_every_schedule_keeps_every_promise(part: int) -> None:
    size = SCHEDULES // PARTS
    first = FIRST_SEED + part * size
    print(f"seeds {first} to {first + size - 1}")
    for seed in range(first, first + size):
        schedule = random_schedule(seed)
        if text := fault(schedule):
            small = shrink(schedule)
            pytest.fail(f"{text}\nshrunk to {len(small.events)} events: {fault(small)}\n{small}")


def test_the_schedules_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + 400):
        cluster = run(random_schedule(seed))
        checker = cluster.checker
        seen.update({f"completed {kind}": count for kind, count in cluster.coordinator.completed.items()})
        seen.update(commits=len(checker.contents), pulls=checker.pulls, expired=checker.parked_out)
        seen.update(aborts=len(checker.aborts), restored=cluster.recoveries > 0)
        seen.update(outside=checker.refusals)
    print(f"first seed {FIRST_SEED}: {dict(seen)}")
    kinds = {f"completed {kind}" for kind in ("join", "leave", "dead", "cut", "restore", "rollback")}
    assert kinds <= {name for name, count in seen.items() if count >= 20}
    assert seen["commits"] > 2_000
    assert seen["pulls"] > seen["commits"]
    assert min(seen["expired"], seen["aborts"], seen["restored"], seen["outside"]) >= 10


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    profile, within, first = PLANTED[bug]
    for seed in range(first, first + within):
        if text := fault(random_schedule(seed, profile), frozenset([bug])):
            print(f"seed {seed}: {text[:200]}")
            return
    pytest.fail(f"{within} schedules did not show {bug}")


def test_a_failing_schedule_shrinks_to_one_that_needs_every_event() -> None:
    bugs = frozenset(["dedup_off"])
    schedule = next(s for s in map(random_schedule, range(200)) if fault(s, bugs))
    small = shrink(schedule, bugs)
    assert len(small.events) < len(schedule.events)
    assert fault(small, bugs)
    for place in range(len(small.events)):
        assert not fault(replace(small, events=small.events[:place] + small.events[place + 1 :]), bugs)
