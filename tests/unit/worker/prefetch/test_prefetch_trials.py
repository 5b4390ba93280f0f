"""Trials of a prefetch: the faster way is kept, the order stays, and rows are those of a loop without it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.worker.prefetch import batches as prefetch_batches
from sparserow.worker.prefetch.pipeline import Pipeline
from sparserow.worker.prefetch.trials import AheadTrial, Trial, hint_trial_of

ROWS, TABLES, DEPTH, STEPS = 60, 3, 2, 40


def ways_of(
    seconds: Callable[[bool, int], float],
    steps: int,
    passes: int = 1,
    after: Callable[[AheadTrial, bool], None] = lambda *_: None,
    trial: Trial | None = None,
    depth: int = DEPTH,
) -> list[bool]:
    """Returns the ways of the batches of a loop whose steps take ``seconds(way, batches since the way changed)``.

    ``after`` is called with the trial and the way of each batch after it was taken.
    """
    trial, ways, now = trial or AheadTrial(depth), [], 0.0
    for _ in range(passes):
        trial.begin()
        under_way = deque(trial.is_on for _ in range(depth))
        run = 0
        for _ in range(steps):
            under_way.append(trial.is_on)
            way = under_way.popleft()
            run = run + 1 if ways and ways[-1] == way else 0
            ways.append(way)
            trial.note(way, now)
            after(trial, way)
            now += seconds(way, run)
        now += 1000.0  # an evaluation between two passes
    return ways


@pytest.mark.parametrize(("share", "least", "most"), [(0.8, 20, 70), (0.7, 9_000, 9_950)])
def test_batches_whose_rows_are_left_to_their_step_end_a_trial_soon(share: float, least: int, most: int) -> None:
    def left(trial: AheadTrial, way: bool) -> None:
        if way:
            trial.note_left(share)

    ways = ways_of(lambda way, _: 0.9 if way else 1.0, 10_000, after=left)
    assert least < ways.count(True) < most
    assert ways[:4] == [True] * 4


def changes(ways: list[bool]) -> int:
    return sum(one != other for one, other in pairwise(ways))


@pytest.mark.parametrize("faster", [False, True])
def test_the_faster_way_is_kept_and_trials_in_vain_become_rare(faster: bool) -> None:
    ways = ways_of(lambda way, _: 1.0 if way is faster else 1.1, 10_000)
    assert ways.count(faster) > 0.97 * len(ways)
    assert 2 < changes(ways) < 25


def test_hints_that_cost_more_than_they_hide_are_left_out_and_tried_again_within_1024_steps() -> None:
    class Owner:
        """Stands for a session."""

    owner, other = Owner(), Owner()
    trial = hint_trial_of(owner, DEPTH, 4, True, True)
    assert trial is hint_trial_of(owner, DEPTH, 4, True, True), "an epoch goes on with what the one before has found"
    assert trial is not hint_trial_of(owner, DEPTH, 4, True, False)
    assert trial is not hint_trial_of(other, DEPTH, 4, True, True)
    ways = ways_of(lambda way, _: 1.3 if way else 1.0, 20_000, trial=trial, depth=DEPTH + 4)
    assert ways.count(False) > 0.97 * len(ways)
    ends = [step for step, (one, next_one) in enumerate(pairwise(ways)) if one and not next_one]
    assert max(later - end for end, later in pairwise(ends)) <= 1024 + 2 * (12 + 2 * (DEPTH + 4 + 2))


def test_a_way_that_becomes_the_faster_one_is_found_again() -> None:
    step = iter(range(10_000))
    ways = ways_of(lambda way, _: 2.0 if way is (next(step) < 500) else 1.0, 10_000)
    assert ways[300:500].count(False) > 100
    assert ways[2000:].count(True) > 0.95 * len(ways[2000:])


def test_the_steps_after_a_change_belong_to_neither_way() -> None:
    ways = ways_of(lambda way, run: 100.0 if run < DEPTH else 1.0 if way else 1.1, 2000)
    assert ways.count(True) > 0.9 * len(ways)


def test_short_passes_are_pulled_ahead_and_a_pause_between_passes_is_not_a_step() -> None:
    assert all(ways_of(lambda *_: 1.0, DEPTH + 2, passes=200))
    ways = ways_of(lambda way, _: 1.1 if way else 1.0, DEPTH + 5, passes=400)
    assert ways.count(False) > 0.8 * len(ways)


def test_items_that_skip_the_stages_keep_their_order() -> None:
    inside, goes_on = threading.Event(), threading.Event()

    def work(item: int) -> int:
        if item == 1:
            inside.set()
            assert goes_on.wait(60)
        return item + 1000

    def source() -> Iterator[int]:
        yield from (0, 1)
        assert inside.wait(60)
        yield 2  # skips, while 1 is in a stage
        goes_on.set()
        yield from range(3, 200)

    pipeline = Pipeline(source(), [("work", work)], depth=5, skips=lambda item: item % 3 != 1)
    taken = [pipeline.take() for _ in range(200)]
    assert [item % 1000 for item in taken] == list(range(200))
    assert {item for item in taken if item >= 1000} >= {1000 + item for item in range(1, 200, 3)}
    assert sum(item < 1000 for item in taken) > 0


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 3) for _ in range(TABLES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([table(x[:, i]).sum(0) for i, table in enumerate(self.tables)])


class InTurns(AheadTrial):
    """Changes its way every three batches."""

    def note(self, was_on: bool, now: float) -> None:
        del was_on, now
        self._run += 1
        self.is_on = self._run // 3 % 2 == 0


def train(session: sr.Session, batches_of: Callable[[list[Tensor]], Any]) -> list[np.ndarray[Any, Any]]:
    torch.manual_seed(1)
    model = session.distribute(Columns(), optimizer=sr.optim.Adagrad(lr=0.3), min_rows=1)
    draw = torch.Generator().manual_seed(2)
    batches = batches_of([torch.randint(ROWS, (7, TABLES), generator=draw) for _ in range(STEPS)])
    for _ in range(2):
        for batch in batches:
            (model(batch) ** 2).sum().backward()
            session.step()
    return [session.table(f"tables.{i}").pull(np.arange(ROWS)) for i in range(TABLES)]


class Lefts(AheadTrial):
    """Notes the shares of rows that were left to their step, and pulls all batches ahead."""

    def __init__(self) -> None:
        super().__init__(DEPTH)
        self.shares: list[float] = []

    def note(self, was_on: bool, now: float) -> None:
        del was_on, now

    def note_left(self, share: float) -> None:
        self.shares.append(share)


@pytest.mark.parametrize(("rows", "is_left"), [(4, True), (1_000_000, False)])
def test_the_share_of_rows_that_are_left_is_that_of_the_batch(
    rows: int, is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Lefts()
    monkeypatch.setattr(prefetch_batches, "ahead_trial_of", lambda *_: trial)
    with sr.InProcessCluster(shards=1).connect("left") as session:
        with sr.deferred(min_rows=1):
            model: nn.Module = nn.Sequential(nn.Embedding(rows, 3))
        model = session.distribute(model, optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        draw = torch.Generator().manual_seed(2)
        for batch in session.prefetch([torch.randint(rows, (64,), generator=draw) for _ in range(20)], depth=DEPTH):
            model(batch).sum().backward()
            session.step()
    assert len(trial.shares) == 19, "the first batch is learnt from"
    assert all(0 <= share <= 1 for share in trial.shares)
    assert max(trial.shares) > 0.9 if is_left else max(trial.shares) < 0.3


def test_rows_do_not_depend_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_batches, "ahead_trial_of", lambda *_: InTurns(DEPTH))
    with sr.InProcessCluster(shards=2).connect("plain") as session:
        expected = train(session, lambda batches: batches)
    with sr.InProcessCluster(shards=2).connect("ahead") as session:
        rows = train(session, lambda batches: session.prefetch(batches, depth=DEPTH))
        stats = session.stats()
    for one, other in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert 20 < stats.batches_aside < 60
    assert stats.rows_prefetched > 0
    assert stats.pulls_merged >= 20  # batches aside are pulled once by their forward
    assert stats.lookups_missed == 0


def test_every_batch_is_pulled_ahead_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_batches, "ahead_trial_of", lambda *_: InTurns(DEPTH))
    with sr.InProcessCluster(shards=2).connect("always") as session:
        train(session, lambda batches: session.prefetch(batches, depth=DEPTH, always=True))
        assert session.stats().batches_aside == 0
