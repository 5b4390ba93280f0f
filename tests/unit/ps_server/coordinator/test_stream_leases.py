"""Which worker reads which part of a stream. All interleavings are in tests/model/test_stream_positions.py."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import pytest

from sparserow.proto.errors import FailedPrecondition, InvalidArgument
from sparserow.ps_server.coordinator.state.data_leases import DataLeases, LeaseRequest
from sparserow.ps_server.coordinator.state.stream_leases import JobStream
from sparserow.ps_server.coordinator.state.stream_requests import (
    MOST_PARTS,
    MOST_PLANNED,
    EventCounts,
    PlannedBatch,
    StreamAnswer,
    StreamPart,
    StreamRequest,
    WorkerKey,
)

A, B = (0, 1), (1, 1)


def partitions(count: int, end: int | None = None) -> list[StreamPart]:
    return [StreamPart(f"clicks/{number}", 0, end) for number in range(count)]


def request_of(
    found: Sequence[StreamPart] = (),
    *,
    settled: int = -1,
    planned: Sequence[PlannedBatch] = (),
    given_back: Collection[str] = (),
    most: int = MOST_PARTS,
    source: str = "clicks",
    run: str = "run",
    idle: Collection[str] = (),
) -> StreamRequest:
    return StreamRequest(run, source, settled, planned, found, given_back, most, idle=idle)


def asked(stream: JobStream, who: WorkerKey, members: Sequence[WorkerKey], request: StreamRequest) -> StreamAnswer:
    request.check()
    return stream.answer(request, who, members, members)


def stream() -> JobStream:
    return JobStream("run", 1, "clicks")


def test_members_share_the_parts_evenly_and_give_back_what_a_newcomer_lacks() -> None:
    it = stream()
    assert sorted(asked(it, A, [A], request_of(partitions(5))).parts) == [f"clicks/{n}" for n in range(5)]
    assert asked(it, B, [A, B], request_of()).parts == {}
    given = asked(it, A, [A, B], request_of())
    assert given.give_back == ("clicks/3", "clicks/4")
    assert set(asked(it, A, [A, B], request_of(given_back=given.give_back)).parts) == {
        "clicks/0",
        "clicks/1",
        "clicks/2",
    }
    assert set(asked(it, B, [A, B], request_of()).parts) == {"clicks/3", "clicks/4"}
    assert asked(it, A, [A, B], request_of()).give_back == ()
    it.left(B, -1)
    assert len(asked(it, A, [A], request_of()).parts) == 5


def test_more_members_than_parts_leave_some_without() -> None:
    it = stream()
    members = [(n, 1) for n in range(4)]
    given = [asked(it, who, members, request_of(partitions(2))) for who in members]
    assert [len(each.parts) for each in given] == [1, 1, 0, 0]
    assert not any(each.is_over for each in given)


def test_positions_move_with_commits_that_are_applied() -> None:
    it = stream()
    asked(it, A, [A], request_of(partitions(2)))
    batches = [
        PlannedBatch(step, {"clicks/0": 10 * (step + 1)}, counts=EventCounts(events=9, dead=1)) for step in range(3)
    ]
    asked(it, A, [A], request_of(planned=batches))
    assert it.positions == {"clicks/0": 0, "clicks/1": 0}
    asked(it, A, [A], request_of(settled=0))
    assert (it.positions["clicks/0"], it.counts) == (10, EventCounts(events=9, dead=1))
    it.left(A, 1)  # as the shards say
    assert (it.positions["clicks/0"], it.counts) == (20, EventCounts(events=18, dead=2))
    assert asked(it, B, [B], request_of()).parts["clicks/0"].position == 20


def test_an_announcement_that_comes_twice_counts_once() -> None:
    it = stream()
    asked(it, A, [A], request_of(partitions(1)))
    for _ in range(2):
        asked(it, A, [A], request_of(planned=[PlannedBatch(0, {"clicks/0": 4}, counts=EventCounts(events=4))]))
    for _ in range(2):
        asked(
            it, A, [A], request_of(settled=0, planned=[PlannedBatch(1, {"clicks/0": 6}, counts=EventCounts(events=2))])
        )
    it.left(A, 1)
    assert (it.positions, it.counts.events) == ({"clicks/0": 6}, 6)


def test_events_are_read_one_by_one_where_a_worker_died() -> None:
    it = stream()
    asked(it, A, [A], request_of(partitions(1)))
    asked(it, A, [A], request_of(planned=[PlannedBatch(0, {"clicks/0": 100})]))
    it.left(A, -1)
    deaths = []
    for number in range(2, 4):
        who = (number, 1)
        part = asked(it, who, [who], request_of()).parts["clicks/0"]
        assert (part.position, part.careful_until) == (0, 100)
        deaths.append(part.deaths)
        asked(it, who, [who], request_of(planned=[PlannedBatch(0, {"clicks/0": 1})]))
        it.left(who, -1)
    assert deaths == [0, 1]
    part = asked(it, B, [B], request_of()).parts["clicks/0"]
    assert part.deaths == 2  # three workers died at this event
    asked(it, B, [B], request_of(planned=[PlannedBatch(0, {"clicks/0": 1}, counts=EventCounts(dead=1))]))
    asked(it, B, [B], request_of(settled=0))
    it.left(B, 0)
    part = asked(it, A, [A], request_of()).parts["clicks/0"]
    assert (part.position, part.careful_until, part.deaths) == (1, 100, 0)


def test_a_worker_that_leaves_by_itself_is_no_death() -> None:
    it = stream()
    asked(it, A, [A], request_of(partitions(1)))
    asked(it, A, [A], request_of(planned=[PlannedBatch(0, {"clicks/0": 100})]))
    it.left(A, -1, is_orderly=True)
    assert asked(it, B, [B], request_of()).parts["clicks/0"].careful_until == 0


def test_a_run_ends_at_the_ends_that_it_finds_and_the_next_goes_on() -> None:
    it = stream()
    asked(it, A, [A], request_of(partitions(1, end=8)))
    asked(it, A, [A], request_of(partitions(1, end=12), planned=[PlannedBatch(0, {"clicks/0": 8}, ["clicks/0"])]))
    assert asked(it, A, [A], request_of(settled=0)).is_over
    it.left(A, 0)
    given = asked(it, B, [B], request_of(partitions(1, end=12), run="next"))
    assert (given.parts["clicks/0"].position, given.parts["clicks/0"].end) == (8, 12)
    assert not given.is_over


def test_files_of_the_past_take_no_room() -> None:
    it = stream()
    step = 0
    for day in range(300):
        names = [f"day{day:03d}/{part}" for part in range(3)]
        given = asked(it, A, [A], request_of([StreamPart(name, 0, is_whole=True) for name in names], most=1))
        for _ in names:
            (name,) = given.parts
            planned = [PlannedBatch(step, {name: 5}, [name], EventCounts(events=5))]
            given = asked(it, A, [A], request_of(planned=planned, settled=step - 1, most=1))
            step += 1
    asked(it, A, [A], request_of(settled=step - 1, most=1))
    assert it.positions == {}
    assert (it.done_to, it.counts.events) == ("day299/2", 300 * 3 * 5)
    late = asked(it, A, [A], request_of([StreamPart("day100/9", 0, is_whole=True)], settled=step - 1, most=1))
    assert late.parts == {}
    assert late.is_over
    assert len(json.dumps(it.to_document())) < 1_000


def test_what_no_worker_may_say_is_refused() -> None:
    it = stream()
    asked(it, A, [A, B], request_of(partitions(2)))
    with pytest.raises(FailedPrecondition, match="clicks/1 is not leased to this worker"):
        asked(it, A, [A, B], request_of(planned=[PlannedBatch(0, {"clicks/1": 1})]))
    with pytest.raises(FailedPrecondition, match="other workers of this job read clicks, and this one views"):
        asked(it, B, [A, B], request_of(source="views"))
    asked(it, A, [A, B], request_of(planned=[PlannedBatch(0, {"clicks/0": 5})]))
    asked(it, A, [A, B], request_of(settled=0))
    with pytest.raises(InvalidArgument, match="position of clicks/0: 4 is not allowed; allowed: >= 5"):
        asked(it, A, [A, B], request_of(settled=0, planned=[PlannedBatch(1, {"clicks/0": 4})]))
    for request, words in (
        (request_of([StreamPart("a", -1)]), "position: -1"),
        (request_of(planned=[PlannedBatch(3, {}), PlannedBatch(5, {})]), "consecutive steps"),
        (request_of(planned=[PlannedBatch(n, {}) for n in range(MOST_PLANNED + 1)]), "at most 1024 batches"),
        (request_of(planned=[PlannedBatch(0, {}, counts=EventCounts(lost=-1))]), "planned.lost: -1"),
        (request_of(most=0), "most: 0"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            request.check()
    with pytest.raises(InvalidArgument, match="4097 partitions or files that are not read yet; allowed: at most 4096"):
        asked(it, A, [A, B], request_of(partitions(MOST_PARTS + 1)))
    assert len(it.positions) == 2


def test_a_job_reads_files_or_a_stream() -> None:
    leases = DataLeases()
    leases.answer_stream(7, 1, request_of(partitions(1)), A, [A], [A])
    with pytest.raises(FailedPrecondition, match="other workers of this job read a stream"):
        leases.answer(7, 1, LeaseRequest("run", 1, 3, (), 0), B, [A, B])
    leases.left(7, A, -1, is_orderly=True)
    leases.answer(7, 2, LeaseRequest("run", 1, 3, (), 0), B, [B])
    with pytest.raises(FailedPrecondition, match=r"other workers of this job read data\.train"):
        leases.answer_stream(7, 2, request_of(partitions(1)), A, [A, B], [A, B])


def test_a_checkpoint_has_the_positions_of_its_rows() -> None:
    leases = DataLeases()
    leases.answer_stream(7, 1, request_of(partitions(1)), A, [A], [A])
    planned = [PlannedBatch(step, {"clicks/0": 5 * (step + 1)}, counts=EventCounts(events=5)) for step in range(4)]
    leases.answer_stream(7, 1, request_of(planned=planned), A, [A], [A])
    saved = json.loads(json.dumps(leases.at_cut({7: {A: 1}})[7]))
    leases.left(7, A, 3, is_orderly=False)
    leases.restore(7, 2, saved)
    given = leases.answer_stream(7, 2, request_of(partitions(1), run="again"), B, [B], [B])
    assert (given.parts["clicks/0"].position, given.counts.events) == (10, 0)
    assert leases.jobs[7].counts.events == 10  # of both runs


def test_the_largest_stream_is_answered_soon() -> None:
    it = stream()
    members = [(n, 1) for n in range(512)]
    found = partitions(MOST_PARTS)
    given: dict[WorkerKey, tuple[str, ...]] = {}
    for step in range(4):
        for who in members:
            planned = [PlannedBatch(step, dict.fromkeys(given.get(who, ()), step + 1))]
            request = request_of(found if step == 0 and who == members[0] else (), settled=step - 1, planned=planned)
            given[who] = tuple(it.answer(request, who, members, set(members)).parts)
    assert sorted(name for own in given.values() for name in own) == sorted(part.name for part in found)
    assert set(it.positions.values()) == {3}


def test_a_topic_that_the_job_names_no_more_keeps_its_position() -> None:
    it = stream()
    asked(it, A, [A], request_of([StreamPart("clicks/0", 0), StreamPart("views/0", 0)]))
    planned = [PlannedBatch(0, {"clicks/0": 5, "views/0": 7})]
    asked(it, A, [A], request_of(planned=planned))
    it.left(A, 0, is_orderly=True)
    it = JobStream.of_document(json.loads(json.dumps(it.to_document())))
    given = asked(it, B, [B], request_of([StreamPart("clicks/0", 0)], source="clicks alone", run="next"))
    assert {name: part.position for name, part in given.parts.items()} == {"clicks/0": 5}
    it.left(B, -1, is_orderly=True)
    both = [StreamPart("clicks/0", 0), StreamPart("views/0", 0), StreamPart("buys/0", 3)]
    given = asked(it, A, [A], request_of(both, source="all", run="third"))
    assert {name: part.position for name, part in given.parts.items()} == {"clicks/0": 5, "views/0": 7, "buys/0": 3}


def test_a_worker_of_an_older_run_leaves_no_part_that_the_new_run_does_not_read() -> None:
    it = stream()
    asked(it, A, [A], request_of([StreamPart("clicks/0", 0), StreamPart("views/0", 0)]))
    assert asked(it, B, [A, B], request_of([StreamPart("clicks/0", 0)], run="next")).parts == {}
    it.left(A, -1)
    assert set(asked(it, B, [B], request_of(run="next")).parts) == {"clicks/0"}


def test_a_file_that_is_gone_holds_up_no_other() -> None:
    it = stream()
    files = [StreamPart(f"day-{number}", 0, is_whole=True) for number in range(3)]
    asked(it, A, [A], request_of(files, most=1))
    it.left(A, -1)
    given = asked(it, A, [A], request_of(files[1:], most=1, run="next"))
    assert set(given.parts) == {"day-1"}
    asked(it, A, [A], request_of(planned=[PlannedBatch(0, {"day-1": 9}, ("day-1",))], run="next", most=1))
    assert asked(it, A, [A], request_of(settled=0, run="next", most=1)).done_to == "day-1"


def test_files_of_another_pattern_begin_anew() -> None:
    it = stream()
    file = [StreamPart("log/a", 0, is_whole=True)]
    asked(it, A, [A], request_of(file))
    asked(it, A, [A], request_of(planned=[PlannedBatch(0, {"log/a": 9}, ("log/a",))]))
    it.left(A, 0, is_orderly=True)
    assert it.done_to == "log/a"
    given = asked(it, A, [A], request_of([StreamPart("a/a", 0, is_whole=True)], source="others", run="next"))
    assert (set(given.parts), given.done_to) == ({"a/a"}, "")


def read_to(step: int, times: dict[str, int]) -> PlannedBatch:
    return PlannedBatch(step, dict.fromkeys(times, step + 1), times=times)


def test_the_watermark_is_the_lowest_of_the_latest_times_that_are_applied() -> None:
    it = stream()
    both = [A, B]
    assert asked(it, A, both, request_of(partitions(4), planned=())).watermark is None
    asked(it, B, both, request_of())
    asked(it, A, both, request_of(planned=[read_to(0, {"clicks/0": 50, "clicks/1": 70})]))
    assert asked(it, A, both, request_of(settled=0)).watermark is None  # the other worker's parts have said none
    asked(it, B, both, request_of(planned=[read_to(0, {"clicks/2": 60, "clicks/3": 90})]))
    assert asked(it, A, both, request_of(settled=0)).watermark is None  # announced, and not applied
    assert asked(it, B, both, request_of(settled=0)).watermark == 50
    asked(it, A, both, request_of(settled=0, planned=[read_to(1, {"clicks/0": 65, "clicks/1": 10})]))
    assert asked(it, A, both, request_of(settled=1)).watermark == 60  # a late event takes no part back
    saved = json.loads(json.dumps(it.to_document()))
    assert JobStream.of_document(saved).watermark == 60
    assert JobStream.of_document(saved).restored(2).watermark == 60


def test_the_watermark_waits_for_no_idle_part_and_does_not_go_back() -> None:
    it = stream()
    asked(it, A, [A], request_of(partitions(3)))
    asked(it, A, [A], request_of(planned=[read_to(0, {"clicks/0": 50, "clicks/1": 40})]))
    assert asked(it, A, [A], request_of(settled=0)).watermark is None
    assert asked(it, A, [A], request_of(settled=0, idle=["clicks/2"])).watermark == 40
    assert asked(it, A, [A], request_of(settled=0, idle=["clicks/1", "clicks/2"])).watermark == 50
    assert asked(it, A, [A], request_of(settled=0)).watermark == 50
    assert asked(it, A, [A], request_of(settled=0, idle=[f"clicks/{n}" for n in range(3)])).watermark == 50


def test_the_watermark_waits_for_the_parts_of_a_worker_that_died() -> None:
    it = stream()
    for who in (A, B):
        asked(it, who, [A, B], request_of(partitions(2)))
        asked(it, who, [A, B], request_of(planned=[read_to(0, {f"clicks/{who[0]}": 10 * (who[0] + 1)})]))
    it.left(A, 0)
    asked(it, B, [A, B], request_of(settled=0, planned=[read_to(1, {"clicks/1": 99})]))
    assert asked(it, B, [A, B], request_of(settled=1)).watermark == 10
    assert set(asked(it, B, [B], request_of(settled=1)).parts) == {"clicks/0", "clicks/1"}


def test_files_that_wait_for_their_turn_hold_no_watermark_up() -> None:
    it = stream()
    asked(it, A, [A], request_of([StreamPart(f"day-{n}", 0, is_whole=True) for n in range(3)], most=1))
    asked(it, A, [A], request_of(planned=[read_to(0, {"day-0": 10})], most=1))
    assert asked(it, A, [A], request_of(settled=0, most=1)).watermark == 10
    asked(it, A, [A], request_of(settled=0, most=1, planned=[PlannedBatch(1, {"day-0": 9}, ("day-0",))]))
    assert asked(it, A, [A], request_of(settled=1, most=1)).watermark == 10
