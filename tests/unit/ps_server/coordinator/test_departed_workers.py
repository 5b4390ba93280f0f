"""What is kept of workers that have left: until a checkpoint has it, and within a bound."""

from __future__ import annotations

import json

import pytest

from sparserow.ps_server.coordinator.state import departed_workers, lost_commits
from sparserow.ps_server.coordinator.state.departed_workers import DepartedWorker, DepartedWorkers
from sparserow.ps_server.coordinator.state.lost_commits import CommitOwner, LostCommits


def worker(number: int, *, mark: int = 5, namespace: str = "ads") -> DepartedWorker:
    return DepartedWorker(namespace, 1, number, 0, 3, mark, (10, 20))


def test_a_checkpoint_that_was_cut_later_has_what_they_gave() -> None:
    departed = DepartedWorkers()
    departed.add(worker(1, mark=5))
    departed.add(worker(2, mark=8))
    departed.saved(4)
    assert len(departed) == 2
    departed.saved(5)
    assert [each.worker_id for each in departed] == [2]
    departed.saved(8)
    assert len(departed) == 0


def test_a_restore_of_their_namespace_takes_back_what_they_gave() -> None:
    departed = DepartedWorkers()
    departed.add(worker(1))
    departed.add(worker(2, namespace="own"))
    departed.restored("ads")
    assert [each.worker_id for each in departed] == [2]
    departed.restored(None)
    assert len(departed) == 0


def test_they_are_bounded_and_survive_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departed_workers, "MOST_COUNTS", 100 * 2)
    departed = DepartedWorkers()
    for number in range(10_000):
        departed.add(worker(number))
    assert (len(departed), departed.forgotten) == (100, 9_900)
    again = DepartedWorkers.of_document(json.loads(json.dumps(departed.to_document())))
    assert (list(again), again.forgotten) == (list(departed), 9_900)
    again.saved(5)
    assert (len(again), again.forgotten) == (0, 0)


def test_a_number_and_the_ranges_of_one_worker_count_once() -> None:
    lost, keys = LostCommits(), CommitOwner(1, 7, 0, 1, is_steps=False)
    assert lost.add_number((1, 7, 0, 1), 30) == 30
    assert lost.add(keys, 10, 19) == 0, "they are among the 30"
    assert lost.add(keys._replace(is_steps=True), 0, 24) == 5
    assert lost.add_number((1, 7, 0, 1), 34) == 0
    assert lost.add_number((1, 7, 0, 1), 36) == 1
    assert lost.add_number((1, 7, 1, 1), 2) == 2
    lost.add_unknown(1, (7, 2, 1))
    lost.add_unknown(1, (7, 2, 1))
    lost.add_unknown(0, None, 3)
    lost.tear(1, "ads")
    lost.tear(1, "own")
    for each in (lost, LostCommits.of_document(json.loads(json.dumps(lost.to_document())))):
        assert [each.count(shard) for shard in (0, 1)] == [0, 38]
        assert [each.unknown(shard) for shard in (0, 1)] == [3, 1]
        assert each.torn(1) == ["ads", "own"]
        assert each.add_number((1, 7, 1, 1), 2) == 0
        each.restored("own")
        assert each.torn(1) == ["ads"]
        each.restored(None)
        assert each.torn(1) == []


def test_what_is_counted_is_bounded_and_then_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_commits, "MOST_WORKERS", 10)
    lost = LostCommits()
    for number in range(1000):
        lost.add_number((0, 1, number, 1), 2)
    assert (lost.count(0), lost.unknown(0)) == (20, 990)
    assert len(json.dumps(lost.to_document())) < 1000
