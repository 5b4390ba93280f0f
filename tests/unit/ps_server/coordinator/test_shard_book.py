"""Shard leases on a clock of the test's own: claims, loss, return, lineage, what a user is told."""

from __future__ import annotations

import pytest

from sparserow.proto.errors import FailedPrecondition, InvalidArgument, NotFound
from sparserow.ps_server.coordinator.state.shards import PlaceNotFree, Shard, ShardBook, ShardPhase

LEASE = 10.0
DATA = ("127.0.0.1", 5000)


@pytest.fixture
def book() -> ShardBook:
    return ShardBook(2, LEASE)


def register(
    book: ShardBook,
    index: int,
    instance: int,
    *,
    now: float = 0.0,
    tables: int = 0,
    problem: str = "",
    passes: bool = False,
) -> Shard:
    return book.register(
        index,
        instance=instance,
        control=("127.0.0.1", 4000),
        pid=instance,
        tables=tables,
        now=now,
        problem=problem,
        passes=passes,
    )


def serve(book: ShardBook, index: int, instance: int, *, now: float = 0.0) -> None:
    register(book, index, instance, now=now)
    book.heartbeat(index, instance=instance, data=DATA, draining=False, now=now)
    book.mark_serving(index, instance)


def test_the_way_to_ready_is_told_in_words(book: ShardBook) -> None:
    assert book.problem() == "0 of 2 shards have registered; waiting for shards 0, 1"
    serve(book, 0, 7)
    assert book.problem() == "1 of 2 shards have registered; waiting for shard 1"
    register(book, 1, 8)
    assert book.problem() == "shard 1: its process is not serving yet"
    serve(book, 1, 8)
    assert book.problem() == ""


def test_a_shard_that_is_held_is_not_given_away(book: ShardBook) -> None:
    serve(book, 0, 7)
    with pytest.raises(FailedPrecondition, match=r"shard 0 is held by process 7; .* 4\.0 s"):
        register(book, 0, 8, now=6.0)
    assert book.shards[0].instance == 7


@pytest.mark.parametrize("index", [-1, 2])
def test_a_shard_beyond_the_cluster_is_refused(book: ShardBook, index: int) -> None:
    with pytest.raises(InvalidArgument, match=r"allowed: \[0, 1\], the cluster has 2 shards"):
        register(book, index, 7)


def test_a_lost_shard_comes_back_but_is_behind(book: ShardBook) -> None:
    serve(book, 0, 7, now=0.0)
    assert book.expire(9.9) == []
    assert [shard.index for shard in book.expire(10.0)] == [0]
    assert book.shards[0].phase is ShardPhase.LOST
    shard = book.heartbeat(0, instance=7, data=DATA, draining=False, now=11.0)
    assert (shard.phase, shard.behind) == (ShardPhase.STARTING, True)
    book.mark_serving(0, 7)
    assert shard.phase is ShardPhase.SERVING


def test_a_process_that_lost_its_rows_is_restored_or_refused(book: ShardBook) -> None:
    serve(book, 0, 7)
    book.leave(0, 7)
    with pytest.raises(FailedPrecondition, match="shard 0 ended with its rows of 3 tables, and why not;"):
        register(book, 0, 8, tables=3, problem="why not")
    shard = register(book, 0, 8, tables=0, problem="why not")
    assert (shard.instance, shard.restoring) == (8, False)
    book.leave(0, 8)
    shard = register(book, 0, 9, tables=3)
    assert (shard.instance, shard.lineage, shard.restoring) == (9, 3, True)
    assert register(book, 0, 9, tables=3).restoring, "it comes again before it has its rows"


def test_the_same_process_may_register_again_and_keeps_its_lineage(book: ShardBook) -> None:
    serve(book, 0, 7)
    assert register(book, 0, 7, tables=3).lineage == 1


def test_another_process_writes_another_lineage(book: ShardBook) -> None:
    serve(book, 0, 7)
    serve(book, 1, 8)
    assert [shard.lineage for shard in book.shards] == [1, 1]
    book.leave(1, 8)
    assert register(book, 1, 9).lineage == 2


def test_a_process_that_does_not_hold_the_shard_must_register(book: ShardBook) -> None:
    for index, instance in ((0, 7), (5, 7)):
        with pytest.raises(NotFound):
            book.heartbeat(index, instance=instance, data=None, draining=False, now=0.0)


def test_words_about_a_former_process_change_nothing(book: ShardBook) -> None:
    serve(book, 0, 7)
    book.leave(0, 7)
    serve(book, 0, 8)
    book.leave(0, 7)
    book.mark_behind(0, 7)
    assert book.shards[0].phase is ShardPhase.SERVING


def test_a_draining_shard_does_not_serve_again(book: ShardBook) -> None:
    serve(book, 0, 7)
    serve(book, 1, 8)
    book.heartbeat(0, instance=7, data=DATA, draining=True, now=1.0)
    book.mark_serving(0, 7)
    assert book.problem() == "shard 0: its process is stopping"


def test_leases_are_longer_by_the_time_nobody_could_be_heard(book: ShardBook) -> None:
    serve(book, 0, 7, now=0.0)
    book.extend(7.0)
    assert book.expire(16.9) == []
    assert [shard.index for shard in book.expire(17.0)] == [0]


def test_a_place_that_may_come_free_is_told_from_one_that_is_lost(book: ShardBook) -> None:
    serve(book, 0, 7)
    with pytest.raises(PlaceNotFree):
        register(book, 0, 8, now=1.0)
    assert book.replaced(1.0) == "", "the process before it may live"
    renewals = book.shards[0].renewals
    book.heartbeat(0, instance=7, data=DATA, draining=False, now=2.0)
    assert book.shards[0].renewals == renewals + 1, "the holder lives"
    book.leave(0, 7)
    words = "shard 0 ended with its rows of 3 tables, and why not; another process is accepted when the job has ended"
    with pytest.raises(PlaceNotFree, match=words):
        register(book, 0, 8, tables=3, problem="why not", passes=True)
    with pytest.raises(FailedPrecondition, match="start a new cluster") as caught:
        register(book, 0, 8, tables=3, problem="why not")
    assert not isinstance(caught.value, PlaceNotFree)


def test_a_shard_comes_back_while_a_process_waits_for_it_or_gets_its_rows(book: ShardBook) -> None:
    serve(book, 0, 7)
    book.leave(0, 7)
    assert not book.shards[0].is_coming_back(0.0), "no process has come"
    with pytest.raises(PlaceNotFree):
        register(book, 0, 8, now=1.0, tables=3, problem="why not", passes=True)
    assert book.shards[0].is_coming_back(2.0)
    assert book.replaced(2.0) == "shard 0 ended with its rows of 3 tables, and why not"
    assert not book.shards[0].is_coming_back(60.0), "it has not asked for long"
    assert book.replaced(60.0) == ""
    assert register(book, 0, 8, now=60.0, tables=3).is_coming_back(61.0)
    assert book.replaced(61.0) == "", "it is let in"
