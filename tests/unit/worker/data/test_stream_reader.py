"""Readers of one stream and the coordinator's leases: each event is in one batch, whoever dies, comes or leaves."""

from __future__ import annotations

import json
import os
import random
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from column_uses import data_of
from sparserow.proto import control_pb2 as pb
from sparserow.proto.config.stream_config import FollowConfig, ProtobufConfig
from sparserow.proto.errors import InvalidArgument, NotFound
from sparserow.ps_server.coordinator.lease_messages import stream_reply, stream_request_of
from sparserow.ps_server.coordinator.state.stream_leases import JobStream
from sparserow.ps_server.coordinator.state.stream_requests import WorkerKey
from sparserow.worker.data import Batch, ClickReader, ReadOptions
from sparserow.worker.data.event_clock import EventClock
from sparserow.worker.data.event_decoder import EventDecoder
from sparserow.worker.data.events import DeadEvent, PartEvents, SourcePart
from sparserow.worker.data.leased import Trained
from sparserow.worker.data.sources import fit_features, open_reader, plan_files
from sparserow.worker.data.sources.followed import FollowedFiles
from sparserow.worker.data.sources.open_reader import event_decoder, file_source
from sparserow.worker.data.sources.protobuf_values import ProtobufValues
from sparserow.worker.data.stream_reader import StreamBatch, StreamReader

BATCH = 8
Values = Mapping[str, list[bytes | None]]


def event(number: int) -> bytes:
    return json.dumps({"x": number, "y": number % 2}).encode()


@pytest.fixture
def setup(tmp_path: Path) -> tuple[ClickReader[Batch], EventDecoder]:
    """What makes batches, and what decodes events: numbers x with a label y."""
    (tmp_path / "like.jsonl").write_bytes(event(0) + b"\n" + event(1) + b"\n")
    like = f"{tmp_path}/like.jsonl"
    stream = f"stream={{kafka: {{brokers: none:1, topics: t}}, like: {like}}}"
    config = data_of(stream, f"test={like}", "format=jsonl", "columns={label: y, numeric: {x: none}}")
    plan = plan_files(config, "train")
    reader = open_reader(config, "train", fit_features(config, plan), ReadOptions(batch_size=BATCH), plan)
    return reader, event_decoder(config)


class Scripted:
    """A source of lists of values, of which a list may grow."""

    most, find_sec, is_endless = 4096, 0.0, False
    name = "script"

    def __init__(self, values: Values, decoder: EventDecoder, draw: random.Random, graves: list[str]) -> None:
        self._values, self._decoder, self._draw, self.graves = values, decoder, draw, graves
        self._at: dict[str, int] = {}
        self._held: Collection[str] = ()

    def find(self, *, is_begun: bool, done_to: str) -> Sequence[SourcePart]:  # noqa: ARG002
        return [SourcePart(name, 0, len(values)) for name, values in self._values.items()]

    def open(self, part: str, position: int, end: int | None) -> None:
        assert part not in self._at
        assert end == len(self._values[part])
        self._at[part] = position

    def close(self, part: str) -> None:
        self._at.pop(part, None)

    def read(self, most: int, wait_sec: float) -> Sequence[PartEvents]:  # noqa: ARG002
        found = []
        for part, at in list(self._at.items()):
            if part in self._held:
                continue
            end = min(at + self._draw.randint(0, most), len(self._values[part]))
            found.append(self._events(part, at, end))
            self._at[part] = end
        return found

    def _events(self, part: str, at: int, end: int) -> PartEvents:
        values = self._values[part][at:end]
        there = np.array([value is not None for value in values], np.bool_)
        made = self._decoder.decode([value for value in values if value is not None], part)
        is_good = there.copy()
        is_good[there] = made.is_good
        places = np.flatnonzero(there)

        def describe(number: int, reason: str) -> DeadEvent:
            return DeadEvent(f"{part}@{at + number}", reason)

        dead = {int(places[each]): describe(int(places[each]), reason) for each, reason in made.faults.items()}
        ends = np.arange(at + 1, end + 1)
        is_end = end == len(self._values[part])
        return PartEvents(part, made.lines, is_good, ends, describe, dead, is_end=is_end, tail=end)

    def hold(self, parts: Collection[str]) -> None:
        self._held = parts

    def lags(self) -> Mapping[str, int]:
        return {part: len(self._values[part]) - at for part, at in self._at.items()}

    def note_settled(self, positions: Mapping[str, int]) -> None:
        for part, at in positions.items():
            assert 0 <= at <= len(self._values[part])

    def bury(self, dead: Sequence[DeadEvent]) -> None:
        self.graves += [each.place for each in dead]

    def stop(self) -> None:
        """Nothing is open."""


def fills(batches: int, *, is_over: bool) -> tuple[int, bool]:
    """As of a worker for whose steps others wait."""
    return max(batches, int(not is_over)), is_over


class Worker:
    """A reader whose commits are applied at once, and the coordinator's leases for it."""

    def __init__(
        self, stream: JobStream, number: int, workers: list[Worker], reader: ClickReader[Batch], source
    ) -> None:
        self.stream, self.key, self.workers, self.step = stream, (number, 1), workers, 0
        self.source = source
        self.reader = StreamReader(reader, source, leases=self, settle=lambda: self.step - 1, max_wait=0.0, meet=fills)
        self.reader.begin_at(1, Trained)
        self.batches: Iterator[Batch] = iter(self.reader)

    def lease(
        self,
        *,
        settled: int,
        planned: Sequence[StreamBatch],
        found: Sequence[SourcePart],
        given_back: Sequence[str],
        lags: Mapping[str, int],
        idle: Sequence[str],
    ) -> pb.LeaseStreamReply:
        message = pb.LeaseStreamRequest(
            run="run",
            source="script",
            settled=settled,
            planned=[
                pb.PlannedBatch(
                    step=step,
                    ends=[pb.PartNumber(part=part, number=end) for part, end in batch.ends.items()],
                    ended=batch.ended,
                    counts=batch.counts,
                    times=[pb.PartNumber(part=part, number=time) for part, time in batch.times.items()],
                )
                for step, batch in enumerate(planned, start=settled + 1)
            ],
            found=[
                pb.FoundPart(name=part.name, first=part.first, end=part.end, is_whole=part.is_whole) for part in found
            ],
            given_back=given_back,
            most=self.source.most,
            lags=[pb.PartNumber(part=part, number=lag) for part, lag in lags.items()],
            idle=idle,
        )
        request = stream_request_of(pb.LeaseStreamRequest.FromString(message.SerializeToString()))
        request.check()
        members: list[WorkerKey] = sorted(worker.key for worker in self.workers)
        return stream_reply(self.stream.answer(request, self.key, members, members))


def numbers_of(batch: Batch) -> list[int]:
    return [int(x) for x in batch.dense[:, 0]]


def test_each_event_is_in_one_batch_whoever_dies(setup: tuple[ClickReader[Batch], EventDecoder]) -> None:
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"SPARSEROW_TEST_SEED={seed}")
    draw = random.Random(seed)
    reader, decoder = setup
    values: dict[str, list[bytes | None]] = {f"t/{part}": [] for part in range(3)}
    for number in range(1_500):
        kind = draw.random()
        some = b"{" if kind < 0.01 else None if kind < 0.02 else event(number)
        values[draw.choice(list(values))].append(some)
    good = {json.loads(each)["x"] for some in values.values() for each in some if each not in (None, b"{")}
    bad = {f"{part}@{at}" for part, some in values.items() for at, each in enumerate(some) if each == b"{"}
    empty = sum(each is None for some in values.values() for each in some)
    stream, workers, graves = JobStream("run", 1, "script"), list[Worker](), list[str]()
    seen: Counter[int] = Counter()
    joined = 0
    for _ in range(20_000):
        if len(workers) < 3 and (not workers or draw.random() < 0.1):
            worker = Worker(stream, joined, workers, reader, Scripted(values, decoder, draw, graves))
            joined += 1
            workers.append(worker)
        worker = draw.choice(workers)
        batch = next(worker.batches, None)
        if batch is None:
            workers.remove(worker)
            stream.left(worker.key, worker.step - 1, is_orderly=True)
            if not workers:
                break
            continue
        if draw.random() < 0.03:  # before its commit
            workers.remove(worker)
            stream.left(worker.key, worker.step - 1)
            continue
        seen.update(numbers_of(batch))
        worker.step += 1
    assert set(seen.values()) == {1}
    assert bad <= set(graves)
    killers = set(graves) - bad  # at which three of these workers died by chance
    places = [place.split("@") for place in killers]
    assert set(seen) == good - {json.loads(values[part][int(at)] or b"")["x"] for part, at in places}
    counts = stream.counts
    assert (counts.events, counts.dead, counts.empty) == (len(seen), len(bad) + len(killers), empty)


def test_an_event_at_which_workers_die_becomes_a_dead_letter(setup: tuple[ClickReader[Batch], EventDecoder]) -> None:
    reader, decoder = setup
    values = {"t/0": [event(number) for number in range(20)]}
    stream, workers, graves = JobStream("run", 1, "script"), list[Worker](), list[str]()
    seen: list[int] = []
    deaths = 0
    for number in range(10):
        worker = Worker(stream, number, workers, reader, Scripted(values, decoder, random.Random(number), graves))
        workers[:] = [worker]
        for batch in worker.batches:
            if 7 in numbers_of(batch):
                deaths += 1
                stream.left(worker.key, worker.step - 1)
                break
            seen += numbers_of(batch)
            worker.step += 1
        else:
            break
    assert deaths == 3
    assert graves == ["t/0@7"]
    assert sorted(seen) == [number for number in range(20) if number != 7]
    assert (stream.counts.events, stream.counts.dead) == (19, 1)


def test_a_batch_whose_step_was_refused_is_buried(setup: tuple[ClickReader[Batch], EventDecoder]) -> None:
    reader, decoder = setup
    values = {"t/0": [event(0), b"{", event(2)]}
    stream, graves = JobStream("run", 1, "script"), list[str]()
    workers: list[Worker] = []
    worker = Worker(stream, 0, workers, reader, Scripted(values, decoder, random.Random(0), graves))
    workers.append(worker)
    for batch in worker.batches:
        if len(batch):
            worker.reader.note_refused()
        worker.step += 1
    assert sorted(graves) == ["t/0@0", "t/0@1", "t/0@2"]


def test_a_worker_takes_as_many_steps_as_the_one_with_the_most_batches(
    setup: tuple[ClickReader[Batch], EventDecoder],
) -> None:
    reader, decoder = setup
    stream, workers = JobStream("run", 1, "script"), list[Worker]()
    source = Scripted({"t/0": [event(number) for number in range(2 * BATCH)]}, decoder, random.Random(0), [])
    worker = Worker(stream, 0, workers, reader, source)
    workers.append(worker)
    met: list[tuple[int, bool]] = []

    def meet(batches: int, *, is_over: bool) -> tuple[int, bool]:
        met.append((batches, is_over))
        return max(batches, 3), is_over and len(met) > 20  # another worker has three batches, for a while longer

    events = StreamReader(reader, source, leases=worker, settle=lambda: worker.step - 1, max_wait=0.0, meet=meet)
    found = []
    for batch in events:
        found.append(len(batch))
        worker.step += 1
    assert sum(found) == 2 * BATCH
    assert len(found) == sum(max(batches, 3) for batches, _ in met)
    assert met[-1] == (0, True)
    assert len(met) == 21
    assert stream.counts.events == 2 * BATCH


def test_a_part_is_read_no_further_ahead_of_the_others_than_the_job_says(tmp_path: Path) -> None:
    (tmp_path / "like.jsonl").write_text('{"x": 0, "y": 0, "t": 0}\n{"x": 1, "y": 1, "t": 1}\n')
    like = f"{tmp_path}/like.jsonl"
    stream = f"stream={{kafka: {{brokers: none:1, topics: t}}, like: {like}}}"
    columns = "columns={label: y, timestamp: t, timestamp_unit: s, numeric: {x: none}}"
    config = data_of(stream, f"test={like}", "format=jsonl", columns)
    plan = plan_files(config, "train")
    reader = open_reader(config, "train", fit_features(config, plan), ReadOptions(batch_size=BATCH), plan)
    values: dict[str, list[bytes | None]] = {
        part: [json.dumps({"x": at + 10_000 * number, "y": 0, "t": at}).encode() for at in range(1_500)]
        for number, part in enumerate(("t/0", "t/1"))
    }

    class Slow(Scripted):
        """One part gives its events one by one."""

        def read(self, most: int, wait_sec: float) -> Sequence[PartEvents]:
            quick = super().read(most, wait_sec)
            found = [each if each.part == "t/0" else self._slowed(each) for each in quick]
            return [each for each in found if len(each.ends)]

        def _slowed(self, events: PartEvents) -> PartEvents:
            first, rest = events.cut(min(2, len(events.ends)))
            self._at[events.part] -= len(rest.ends)
            return replace(first, is_end=first.is_end and not len(rest.ends), tail=0)

    def furthest(max_skew: float | None) -> int:
        source = Slow(values, event_decoder(config), random.Random(0), [])
        workers: list[Worker] = []
        worker = Worker(JobStream("run", 1, "script"), 0, workers, reader, source)
        workers.append(worker)
        clock = EventClock(max_ahead=60.0, idle_after=30.0, max_skew=max_skew)
        batches = StreamReader(
            reader, source, leases=worker, settle=lambda: worker.step - 1, max_wait=0.0, meet=fills, clock=clock
        )
        seen: Counter[int] = Counter()
        at, apart = {0: 0, 1: 0}, 0
        for batch in batches:
            for number in numbers_of(batch):
                seen[number] += 1
                part, at_number = divmod(number, 10_000)
                at[part] = max(at[part], at_number)
            apart = max(apart, at[0] - at[1])
            worker.step += 1
        assert len(seen) == 3_000
        assert set(seen.values()) == {1}
        return apart

    assert furthest(None) > 1_000
    assert furthest(60.0) < 60 + 2 * 16 * BATCH  # what is read at once before the watermark is known to have moved


def test_a_checkpoint_of_files_is_no_place_in_a_stream(setup: tuple[ClickReader[Batch], EventDecoder]) -> None:
    reader, decoder = setup
    source = Scripted({}, decoder, random.Random(0), [])
    events = Worker(JobStream("run", 1, "script"), 0, [], reader, source).reader
    state = events.state_dict()
    assert events.goes_on_from(state)
    assert not events.goes_on_from({**state, "world": 2})
    assert not events.goes_on_from(None)
    with pytest.raises(InvalidArgument, match=r"of a job that reads data\.train"):
        events.goes_on_from({"epoch": 1})
    with pytest.raises(InvalidArgument, match=r"of a job that reads data\.stream"):
        reader.goes_on_from(state)


def test_values_are_decoded_one_by_one_where_one_is_malformed(
    setup: tuple[ClickReader[Batch], EventDecoder],
) -> None:
    _, decoder = setup
    values = [event(1), b'{"x": "two", "y": 0}', b'{\n "x": 3,\r\n "y": 1\n}', b"[]", b'{"x": 5, "y": 7}', event(6)]
    found = decoder.decode(values, "topic/0")
    assert found.is_good.tolist() == [True, False, True, False, False, True]
    assert found.lines.numeric[:, 0].tolist() == [1, 3, 6]
    assert sorted(found.faults) == [1, 3, 4]
    assert "7" in found.faults[4]
    assert len(decoder.decode([], "topic/0").lines) == 0


def test_fields_that_come_are_ignored_and_missing_ones_are_null(
    setup: tuple[ClickReader[Batch], EventDecoder],
) -> None:
    _, decoder = setup
    found = decoder.decode([b'{"x": 1, "y": 0, "new": {"a": [1]}}', b'{"y": 1}'], "topic/0")
    assert found.is_good.all()
    assert np.isnan(found.lines.numeric[1, 0])


def descriptors() -> bytes:
    """A set of descriptors with a message shop.Click."""
    from google.protobuf import descriptor_pb2

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="click.proto", package="shop", syntax="proto3")
    kinds = file.enum_type.add(name="Kind")
    kinds.value.add(name="VIEW", number=0)
    kinds.value.add(name="BUY", number=1)
    click = file.message_type.add(name="Click")
    for number, (name, kind) in enumerate(
        (("x", field.TYPE_INT64), ("y", field.TYPE_INT32), ("name", field.TYPE_BYTES)), start=1
    ):
        click.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    click.field.add(name="kind", number=4, type=field.TYPE_ENUM, type_name=".shop.Kind", label=field.LABEL_OPTIONAL)
    click.field.add(name="tags", number=5, type=field.TYPE_STRING, label=field.LABEL_REPEATED)
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


def test_values_of_protobuf_are_those_of_json(tmp_path: Path) -> None:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    (tmp_path / "set.pb").write_bytes(descriptors())
    values = ProtobufValues(ProtobufConfig(descriptors=f"{tmp_path}/set.pb", message="shop.Click"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(descriptor_pb2.FileDescriptorSet.FromString(descriptors()).file[0])
    click = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Click"))
    made = click(x=2**60, y=0, name="Zoë".encode(), kind=1, tags=["a", "b"])
    line = values.line_of(made.SerializeToString())
    assert json.loads(line or b"") == {"x": 2**60, "y": 0, "name": "Zoë", "kind": "BUY", "tags": ["a", "b"]}
    assert json.loads(values.line_of(click().SerializeToString()) or b"")["y"] == 0  # which is not sent
    assert values.line_of(b"\xff\xff\xff") is None
    assert values.line_of(click(name=b"\xff").SerializeToString()) is None


def test_a_set_of_descriptors_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set.pb").write_bytes(descriptors())
    (tmp_path / "bad.pb").write_bytes(b"no descriptors")
    for path, message, words in (
        ("set.pb", "shop.View", r"protobuf\.message: .*set\.pb has no message shop\.View"),
        ("bad.pb", "shop.Click", r"protobuf\.descriptors: .*bad\.pb is no whole set of descriptors"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            ProtobufValues(ProtobufConfig(descriptors=f"{tmp_path}/{path}", message=message))
    with pytest.raises(NotFound, match=r"none\.pb"):
        ProtobufValues(ProtobufConfig(descriptors=f"{tmp_path}/none.pb", message="shop.Click"))


def follow(tmp_path: Path, **options: object) -> tuple[FollowedFiles, ClickReader[Batch]]:
    (tmp_path / "like.jsonl").write_bytes(event(0) + b"\n" + event(1) + b"\n")
    section = {"files": f"{tmp_path}/day*/*.jsonl", "age": 0, "every": 0.001, **options}
    stream = json.dumps({"follow": section, "like": f"{tmp_path}/like.jsonl"})
    config = data_of(
        f"stream={stream}", f"test={tmp_path}/like.jsonl", "format=jsonl", "columns={label: y, numeric: {x: none}}"
    )
    plan = plan_files(config, "train")
    reader = open_reader(config, "train", fit_features(config, plan), ReadOptions(batch_size=BATCH), plan)
    return FollowedFiles(FollowConfig(**section), file_source(config), is_endless=True), reader


def test_files_that_come_are_each_read_once_in_the_order_of_their_names(tmp_path: Path) -> None:
    source, reader = follow(tmp_path)
    stream, workers = JobStream("run", 1, "script"), list[Worker]()
    workers.append(Worker(stream, 0, workers, reader, source))
    seen: list[int] = []

    def read_until(count: int) -> None:
        worker = workers[0]
        for _ in range(3_000):
            if len(seen) >= count and stream.counts.events >= count:
                return
            seen.extend(numbers_of(next(worker.batches)))
            worker.step += 1
        raise AssertionError(f"{len(seen)} samples, and {count} were written")

    expected = 0
    for day in range(3):
        (tmp_path / f"day{day}").mkdir()
        for part in range(2):
            lines = [event(expected + number) for number in range(11)]
            expected += len(lines)
            (tmp_path / f"day{day}" / f"{part}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        read_until(expected)
        if day == 1:  # another worker goes on
            stream.left(workers[0].key, workers[0].step - 1)
            source, _ = follow(tmp_path)
            workers[:] = [Worker(stream, 1, workers, reader, source)]
    assert seen == list(range(expected))
    assert stream.positions == {}
    assert stream.done_to == f"{tmp_path}/day2/1.jsonl"


def test_a_file_is_whole_by_its_marker(tmp_path: Path) -> None:
    source, _ = follow(tmp_path, marker="_SUCCESS")
    (tmp_path / "day0").mkdir()
    (tmp_path / "day0" / "a.jsonl").write_bytes(event(1) + b"\n")
    assert source.find(is_begun=False, done_to="") == []
    (tmp_path / "day0" / "_SUCCESS").touch()
    assert [part.name for part in source.find(is_begun=False, done_to="")] == [f"{tmp_path}/day0/a.jsonl"]
    assert source.find(is_begun=True, done_to=f"{tmp_path}/day0/a.jsonl") == []


def test_a_file_is_whole_by_its_age(tmp_path: Path) -> None:
    source, _ = follow(tmp_path, age=3600)
    (tmp_path / "day0").mkdir()
    path = tmp_path / "day0" / "a.jsonl"
    path.write_bytes(event(1) + b"\n")
    assert source.find(is_begun=False, done_to="") == []
    os.utime(path, (1_000_000, 1_000_000))
    assert len(source.find(is_begun=False, done_to="")) == 1


def test_a_file_that_comes_late_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, _ = follow(tmp_path)
    for day in (0, 2):
        (tmp_path / f"day{day}").mkdir()
    (tmp_path / "day2" / "a.jsonl").write_bytes(event(1) + b"\n")
    assert len(source.find(is_begun=False, done_to="")) == 1
    (tmp_path / "day0" / "a.jsonl").write_bytes(event(1) + b"\n")
    assert source.find(is_begun=True, done_to=f"{tmp_path}/day2/a.jsonl") == []
    assert f"{tmp_path}/day0/a.jsonl (1 files) sorts before {tmp_path}/day2/a.jsonl" in caplog.text


def test_a_path_that_names_no_file_is_an_error_and_a_pattern_is_not(tmp_path: Path) -> None:
    source, _ = follow(tmp_path)
    assert source.find(is_begun=False, done_to="") == []
    source, _ = follow(tmp_path, files=f"{tmp_path}/none.jsonl")
    with pytest.raises(NotFound, match=r"data\.stream\.follow\.files: .*none\.jsonl"):
        source.find(is_begun=False, done_to="")
