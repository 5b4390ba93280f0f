"""Leases of an epoch's chunks: each is done once by those who stay, again when its worker goes, and never by two."""

from __future__ import annotations

import json
import os
import random
import secrets
from dataclasses import replace

import pytest

from sparserow.proto.errors import FailedPrecondition, InvalidArgument
from sparserow.ps_server.coordinator.state import data_leases, epoch_records
from sparserow.ps_server.coordinator.state.data_leases import DataLeases, JobData, LeaseAnswer, LeaseRequest
from sparserow.ps_server.coordinator.state.epoch_records import (
    EpochRecord,
    EpochRecords,
    EpochTest,
    Sums,
)

A, B = (1, 1), (2, 1)


def ask(epoch: int = 1, *done: int, chunks: int = 3, step: int = 0, run: str = "r", epochs: int = 1) -> LeaseRequest:
    return LeaseRequest(run, epoch, chunks, done, step, epochs)


@pytest.fixture
def data() -> JobData:
    return JobData("r", 1, 1, 3)


def test_each_chunk_is_given_once_and_the_epoch_ends_with_the_last(data: JobData) -> None:
    assert data.answer(ask(), A, {A, B}) == LeaseAnswer(0)
    assert data.answer(ask(), B, {A, B}) == LeaseAnswer(1)
    assert data.answer(ask(1, 0), A, {A, B}) == LeaseAnswer(2)
    assert data.answer(ask(1, 1), B, {A, B}) == LeaseAnswer(), "others still have the last one"
    assert data.answer(ask(1, 2), A, {A, B}) == LeaseAnswer(is_over=True)
    assert data.answer(ask(), B, {A, B}) == LeaseAnswer(is_over=True)
    assert data.answer(ask(2), B, {A, B}) == LeaseAnswer(0)
    assert data.answer(ask(1), A, {A, B}) == LeaseAnswer(is_over=True), (
        "one that comes late goes on to the present epoch"
    )


def test_what_one_had_that_left_goes_to_another(data: JobData) -> None:
    data.answer(ask(step=5), A, {A, B})
    assert data.answer(ask(), B, {A, B}) == LeaseAnswer(1), "its end is not decided yet"
    data.left(A, 7)
    assert data.answer(ask(1, 1), B, {B}) == LeaseAnswer(0, skip=3)
    # Its word that the chunk was done comes too late, from a former self.
    again = (1, 2)
    assert data.answer(ask(1, 0), again, {again, B}) == LeaseAnswer(2)
    assert data.done == {1}
    data.left(B, -1)
    assert data.answer(ask(1, 2), again, {again}) == LeaseAnswer(0, skip=3)


def test_a_call_that_is_repeated_takes_nothing_away(data: JobData) -> None:
    assert data.answer(ask(), A, {A}) == LeaseAnswer(0)
    assert data.answer(ask(), A, {A}) == LeaseAnswer(0)
    assert data.answer(ask(1, 0), A, {A}) == LeaseAnswer(1)
    assert data.answer(ask(1, 0), A, {A}) == LeaseAnswer(1)


def test_what_does_not_fit_is_refused(data: JobData) -> None:
    data.answer(ask(), A, {A})
    with pytest.raises(FailedPrecondition, match="chunks: 4 here and 3 for another worker"):
        data.answer(ask(chunks=4), B, {A, B})
    with pytest.raises(FailedPrecondition, match="epoch: 2 cannot begin yet; 0 of 3 chunks of epoch 1 are done"):
        data.answer(ask(2), B, {A, B})
    for wrong in (ask(chunks=0), ask(epoch=0)):
        with pytest.raises(InvalidArgument, match="is not allowed"):
            DataLeases().answer(1, 1, wrong, A, {A})


def test_another_run_begins_anew_and_the_same_one_goes_on() -> None:
    leases = DataLeases()
    assert leases.answer(7, 1, ask(), A, {A}) == LeaseAnswer(0)
    assert leases.answer(7, 1, ask(1, 0), A, {A}) == LeaseAnswer(1)
    assert leases.answer(7, 2, ask(), B, {B}) == LeaseAnswer(1), "all workers were gone, chunk 0 is done"
    assert leases.answer(7, 3, ask(run="another"), B, {B}) == LeaseAnswer(0)
    for chunk in range(3):
        last = leases.answer(7, 3, ask(1, chunk, run="another"), B, {B})
    assert last.is_over
    assert leases.answer(7, 4, ask(run="another"), B, {B}) == LeaseAnswer(0), "it was over"


def test_a_run_whose_workers_are_all_gone_between_two_epochs_trains_on_none_of_them_again() -> None:
    leases = DataLeases()
    leases.answer(7, 1, ask(epochs=2), A, {A})
    for chunk in range(3):
        last = leases.answer(7, 1, ask(1, chunk, epochs=2), A, {A})
    assert last.is_over
    assert leases.answer(7, 2, ask(epochs=2), B, {B}) == LeaseAnswer(is_over=True), "the first epoch was over"
    assert leases.answer(7, 2, ask(2, epochs=2), B, {B}) == LeaseAnswer(0)
    for chunk in range(3):
        last = leases.answer(7, 2, ask(2, chunk, epochs=2), B, {B})
    assert last.is_over
    assert leases.answer(7, 3, ask(epochs=2), A, {A}) == LeaseAnswer(0), "the run was over"


def test_a_worker_that_comes_late_is_told_which_epoch_is_under_way() -> None:
    leases = DataLeases()
    for epoch in (1, 2):
        for chunk in range(3):
            leases.answer(7, 1, ask(epoch, *range(chunk), epochs=3), A, {A, B})
        leases.answer(7, 1, ask(epoch, 0, 1, 2, epochs=3), A, {A, B})
    leases.answer(7, 1, ask(3, epochs=3), A, {A, B})
    late = leases.answer(7, 1, ask(1, epochs=3), B, {A, B})
    assert (late.is_over, late.epoch) == (True, 3)


def told(data: JobData, epoch: int = 1, *done: int, tested: EpochTest | None = None, holder=A) -> LeaseAnswer:
    """One call of a worker that says 10 samples, 9 measured, for what is done."""
    trained = Sums(10, 9, 4.5, 2.0) if done else None
    return data.answer(replace(ask(epoch, *done, epochs=2), trained=trained, tested=tested), holder, {A, B})


def test_an_epoch_that_is_over_has_the_samples_of_all_and_its_test(data: JobData) -> None:
    assert told(data).chunk == 0
    assert told(data, holder=B).chunk == 1
    assert told(data, 1, 0).chunk == 2
    assert told(data, 1, 0).chunk == 2, "a call that is repeated counts once"
    assert told(data, 1, 1, holder=B).record is None, "not over yet"
    assert told(data, tested=EpochTest(5.0, 0.1, 0.1), holder=B).record is None
    assert told(data, 1, 2).record == EpochRecord(Sums(30, 27, 13.5, 6.0))
    tested = EpochTest(5.0, 0.75, 0.5)
    assert told(data, tested=tested).record == EpochRecord(Sums(30, 27, 13.5, 6.0), tested)
    assert told(data, tested=EpochTest(9.0, 0.9, 0.9)).record.tested == tested, "the first test counts"
    assert told(data, 2).chunk == 0
    assert told(data, 1).record.tested == tested
    again = JobData.of_document(json.loads(json.dumps(data.to_document())))
    assert again.records.get(1) == EpochRecord(Sums(30, 27, 13.5, 6.0), tested)
    leases = DataLeases()
    leases.restore(7, 5, json.loads(json.dumps(data.at_cut({A: 1, B: 1}))))
    assert leases.jobs[7].records == data.records


def test_a_run_that_was_not_tested_or_is_started_again_is_not_begun_anew() -> None:
    leases = DataLeases()
    trained = Sums(10, 10, 5.0, 1.0)
    leases.answer(7, 1, ask(chunks=1), A, {A})
    leases.answer(7, 1, replace(ask(1, 0, chunks=1), trained=trained), A, {A})
    last = leases.answer(7, 2, ask(chunks=1), B, {B})
    assert (last.is_over, last.record) == (True, EpochRecord(trained)), "all were gone before the last test"
    leases.answer(7, 2, replace(ask(chunks=1), tested=EpochTest(1.0, float("nan"), 0.5)), B, {B})
    assert leases.answer(7, 3, replace(ask(chunks=1), again=True), A, {A}).record.tested.log_loss == 0.5
    assert leases.answer(7, 4, replace(ask(chunks=1, run="another"), again=True), A, {A}) == LeaseAnswer(0)


def test_what_no_worker_measures_is_refused() -> None:
    for field, value in (("samples", 1 << 53), ("measured", -1), ("loss_sum", float("nan")), ("seconds", -1.0)):
        with pytest.raises(InvalidArgument, match=rf"trained\.{field}: .* is not allowed; allowed: "):
            DataLeases().answer(1, 1, replace(ask(), trained=replace(Sums(), **{field: value})), A, {A})


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_records, "MOST_EPOCHS", 3)
    records = EpochRecords()
    for epoch in range(1, 6):
        records.train(epoch, Sums(epoch))
    assert [epoch for epoch in range(1, 6) if records.get(epoch)] == [3, 4, 5]
    monkeypatch.setattr(data_leases, "MOST_ENDED_EPOCHS", 5)
    leases = DataLeases()
    for job in range(3):
        leases.jobs[job] = JobData("r", 1, 1, 3, records=EpochRecords.of_document(records.to_document()))
    leases.bound({0})
    assert [len(leases.jobs[job].records) for job in range(3)] == [3, 0, 3], "the oldest job that ended has none left"


def test_it_outlives_the_coordinator(data: JobData) -> None:
    data.answer(ask(), A, {A, B})
    data.answer(ask(1, 0, step=5), A, {A, B})
    assert JobData.of_document(json.loads(json.dumps(data.to_document()))) == data


def test_what_is_kept_of_a_million_chunks_is_small() -> None:
    data = JobData("r", 1, 1, 1 << 20)
    data.answer(ask(chunks=1 << 20), A, {A})
    data.done.update(range(1, 700_000), range(700_001, 1_000_000))
    data.answer(ask(1, 0, chunks=1 << 20, step=5), A, {A})
    text = json.dumps(data.to_document())
    assert len(text) < 300
    assert JobData.of_document(json.loads(text)) == data
    assert data.answer(ask(1, 700_000, chunks=1 << 20, step=9), A, {A}) == LeaseAnswer(1_000_000)


def test_a_cut_knows_which_batches_the_rows_have(data: JobData) -> None:
    data.answer(ask(step=10), A, {A, B})
    data.answer(ask(step=4), B, {A, B})
    cut = data.at_cut({A: 12, B: 3})
    assert cut == {"epoch": 1, "chunks": 3, "done": [], "skips": [(0, 3)], "records": [], "order": 0}
    leases = DataLeases()
    leases.restore(7, 5, json.loads(json.dumps(cut)))
    assert leases.answer(7, 5, ask(step=20), B, {B}) == LeaseAnswer(0, skip=3)
    assert leases.at_cut({7: {B: 21}, 8: {}}) == {7: {**cut, "skips": [(0, 5)]}}
    assert leases.answer(7, 5, ask(1, 0), B, {B}) == LeaseAnswer(1)
    assert leases.answer(7, 6, ask(), A, {A}) == LeaseAnswer(1), "all workers were gone: what was restored goes on"
    assert leases.answer(7, 7, ask(run="another"), A, {A}) == LeaseAnswer(0)
    leases.restore(7, 8, {})
    assert leases.answer(7, 8, ask(), B, {B}) == LeaseAnswer(0)


def test_windows_of_another_order_are_refused_until_the_epoch_is_over() -> None:
    leases, saved = DataLeases(), {"epoch": 1, "chunks": 2, "done": [[0, 1]], "skips": [], "records": [], "order": 3}
    leases.restore(7, 5, saved)
    with pytest.raises(FailedPrecondition, match=r"order: the samples of epoch 1 were leased in another order"):
        leases.answer(7, 5, replace(ask(chunks=2), order=4), A, {A})
    leases.restore(7, 5, {**saved, "done": [[0, 2]]})
    assert leases.answer(7, 5, replace(ask(chunks=2, epochs=2), order=4), A, {A}).is_over
    assert leases.answer(7, 5, replace(ask(2, chunks=2, epochs=2), order=4), A, {A}) == LeaseAnswer(0)
    with pytest.raises(FailedPrecondition, match=r"order: the samples of epoch 2"):
        leases.answer(7, 5, replace(ask(2, chunks=2, epochs=2), order=5), B, {A, B})
    again = DataLeases()
    again.restore(7, 5, json.loads(json.dumps(leases.at_cut({7: {}})[7])))
    assert again.answer(7, 5, replace(ask(2, chunks=2, epochs=2), order=4), B, {B}) == LeaseAnswer(0)


def test_at_random_every_chunk_is_done_and_none_is_held_twice() -> None:
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(200):
        chunks = draw.randrange(1, 8)
        data = JobData("r", 1, 1, chunks)
        members: dict[int, int] = {0: 1}
        chunk_of: dict[tuple[int, int], int | None] = {}
        trained: list[int] = []
        while not data.is_over:
            worker = draw.randrange(4)
            if worker in members and draw.random() < 0.2 and len(members) > 1:
                gone = worker, members.pop(worker)
                chunk_of.pop(gone, None)
                data.left(gone, -1)
                continue
            epoch = members.setdefault(worker, draw.randrange(1 << 30))
            key = worker, epoch
            done = [chunk_of[key]] if chunk_of.get(key) is not None else []
            trained += done
            keys = set(members.items())
            answer = data.answer(LeaseRequest("r", 1, chunks, done, 0), key, keys)
            chunk_of[key] = answer.chunk
            now = [chunk for who, chunk in chunk_of.items() if who in keys and chunk is not None]
            assert len(now) == len(set(now))
        assert sorted(trained) == list(range(chunks)), "whoever stays does each once"
