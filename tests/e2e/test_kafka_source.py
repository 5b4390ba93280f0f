"""Topics of a mock cluster as a source of events (tests/support/kafka_mock.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from column_uses import data_of
from kafka_mock import MockKafka, mock_kafka
from sparserow.proto.config.stream_config import KafkaConfig
from sparserow.proto.errors import DataLoss, InvalidArgument, NotFound, Unavailable
from sparserow.worker.data import BadLine
from sparserow.worker.data.events import DeadEvent, PartEvents
from sparserow.worker.data.sources.kafka import KafkaSource
from sparserow.worker.data.sources.open_reader import event_decoder

pytest.importorskip("confluent_kafka", reason="the extra kafka is not installed")
Opened = Callable[..., KafkaSource]


def event(number: int) -> bytes:
    return json.dumps({"x": number, "y": number % 2}).encode()


@pytest.fixture(scope="module")
def kafka() -> Iterator[MockKafka]:
    with mock_kafka() as running:
        yield running


@pytest.fixture
def opened(tmp_path: Path, kafka: MockKafka) -> Iterator[Opened]:
    """Opens sources of topics, and closes them."""
    (tmp_path / "like.jsonl").write_bytes(event(0) + b"\n" + event(1) + b"\n")
    like = f"{tmp_path}/like.jsonl"
    stream = f"stream={{kafka: {{brokers: none:1, topics: t}}, like: {like}}}"
    config = data_of(stream, f"test={like}", "format=jsonl", "columns={label: y, numeric: {x: none}}")
    sources: list[KafkaSource] = []

    def open_(
        topics: str,
        *,
        start: str = "earliest",
        until: str | None = None,
        lost: bool = False,
        bad: bool = True,
        **options,
    ):
        section = KafkaConfig(brokers=kafka.brokers, topics=(topics,), compacted=True, **options)
        source = KafkaSource(section, event_decoder(config), start=start, until=until, skips_lost=lost, skips_bad=bad)
        sources.append(source)
        return source

    yield open_
    for source in sources:
        source.stop()


def read(source: KafkaSource, is_enough: Callable[[list[PartEvents]], bool]) -> list[PartEvents]:
    found: list[PartEvents] = []
    deadline = time.monotonic() + 60
    while not is_enough(found):
        assert time.monotonic() < deadline, found
        found += source.read(1_000, 0.1)
    return found


def numbers(found: list[PartEvents]) -> list[int]:
    return [int(x) for events in found for x in events.lines.numeric[:, 0]]


def test_partitions_are_read_from_their_positions_to_their_ends(kafka: MockKafka, opened: Opened) -> None:
    kafka.create("plain", 2)
    kafka.produce("plain", {0: map(event, range(10)), 1: map(event, range(10, 14))})
    source = opened("plain", until="latest")
    parts = {part.name: part for part in source.find(is_begun=False, done_to="")}
    assert [(part.first, part.end) for _, part in sorted(parts.items())] == [(0, 10), (0, 4)]
    assert source.find(is_begun=True, done_to="") == []
    kafka.produce("plain", {0: map(event, range(90, 95))})  # behind the end
    source.open("plain/0", 3, 10)
    source.open("plain/1", 4, 4)
    found = read(source, lambda found: len({events.part for events in found if events.is_end}) == 2)
    assert numbers(found) == list(range(3, 10))
    assert {events.part: events.end for events in found if events.is_end} == {"plain/0": 10, "plain/1": 4}
    source.close("plain/0")
    assert not [events for events in source.read(10, 0.3) if events.part == "plain/0"]


def test_a_job_begins_at_the_last_event_and_finds_new_partitions_from_their_first(
    kafka: MockKafka, opened: Opened
) -> None:
    kafka.create("late", 1)
    kafka.produce("late", {0: map(event, range(5))})
    assert [part.first for part in opened("late", start="latest").find(is_begun=False, done_to="")] == [5]
    assert [part.first for part in opened("late", start="latest").find(is_begun=True, done_to="")] == [0]


def test_what_cannot_be_trained_on_is_found_and_kept(kafka: MockKafka, opened: Opened) -> None:
    kafka.create("mixed", 1)
    kafka.create("graves", 1)
    kafka.produce("mixed", {0: [event(1), b"garbage", None, b"", event(5), b'{"x": "a", "y": 1}']})
    source = opened("mixed", dead_letters="graves", until="latest")
    source.open("mixed/0", 0, 6)
    found = read(source, lambda found: any(events.is_end for events in found))
    assert numbers(found) == [1, 5]
    dead = [each for events in found for each in events.dead.values()]
    assert sum(events.empty for events in found) == 2
    source.bury(dead)
    kept = kafka.read("graves")
    assert [message.value() for message in kept] == [b"garbage", b'{"x": "a", "y": 1}']
    assert dict(kept[0].headers())["topic"] == b"mixed"
    assert dict(kept[1].headers())["offset"] == b"5"
    assert b"changed from number to string" in dict(kept[1].headers())["reason"]
    described = found[0].describe(0, "a reason")
    assert (described.value, described.headers["offset"]) == (event(1), "0")
    strict = opened("mixed", bad=False)
    strict.open("mixed/0", 0, None)
    with pytest.raises(BadLine, match="mixed/0, offset 1: 'garbage' cannot be read"):
        read(strict, lambda found: len(numbers(found)) > 2)


def test_frames_of_a_schema_registry_are_left_out(kafka: MockKafka, opened: Opened) -> None:
    kafka.create("framed", 1)
    kafka.produce("framed", {0: [b"\0\0\0\0\x07" + event(1), event(2), b"\0\0\0\0\x07" + event(3)]})
    source = opened("framed", framing="confluent", until="latest")
    source.open("framed/0", 0, 3)
    found = read(source, lambda found: any(events.is_end for events in found))
    assert numbers(found) == [1, 3]
    assert sum(len(events.dead) for events in found) == 1


def test_events_that_retention_has_taken_end_the_job_or_are_counted(kafka: MockKafka, opened: Opened) -> None:
    kafka.create("short", 1)
    kafka.produce("short", {0: map(event, range(20))})
    kafka.delete_before("short", 0, 12)
    source = opened("short")
    source.open("short/0", 4, None)
    words = "short/0 has no event before offset 12 any more, and the job was at 4; with on_lost skip it goes on at 12"
    with pytest.raises(DataLoss, match=words):
        read(source, lambda found: bool(numbers(found)))
    source = opened("short", lost=True)
    source.open("short/0", 4, None)
    found = read(source, lambda found: len(numbers(found)) >= 8)
    assert numbers(found) == list(range(12, 20))
    assert sum(events.lost for events in found) == 8


def test_a_topic_that_was_made_anew_is_named(kafka: MockKafka, opened: Opened) -> None:
    kafka.create("anew", 1)
    kafka.produce("anew", {0: map(event, range(3))})
    source = opened("anew")
    source.open("anew/0", 5_000, None)
    with pytest.raises(DataLoss, match="anew/0 ends at offset 3, so it was made anew, and the job was at 5000"):
        read(source, lambda found: bool(numbers(found)))
    source = opened("anew", lost=True)
    source.open("anew/0", 5_000, None)
    found = read(source, lambda found: len(numbers(found)) >= 3)
    assert (numbers(found), sum(events.lost for events in found)) == ([0, 1, 2], 0)


def test_a_broker_that_goes_and_comes_is_waited_for(kafka: MockKafka, opened: Opened) -> None:
    kafka.create("away", 1)
    kafka.produce("away", {0: map(event, range(5))})
    source = opened("away")
    source.open("away/0", 0, None)
    read(source, lambda found: len(numbers(found)) == 5)
    kafka.stop_broker(1)
    assert not numbers(source.read(10, 1.0))
    kafka.start_broker(1)
    kafka.produce("away", {0: map(event, range(5, 8))})
    assert numbers(read(source, lambda found: len(numbers(found)) == 3)) == [5, 6, 7]


def test_lag_is_what_is_not_read_yet_and_positions_are_committed_for_monitors(kafka: MockKafka, opened: Opened) -> None:
    from confluent_kafka import Consumer, TopicPartition

    kafka.create("watched", 1)
    kafka.produce("watched", {0: map(event, range(30))})
    source = opened("watched", group="monitors")
    source.open("watched/0", 0, None)
    while not numbers(source.read(10, 0.5)):
        pass
    assert source.lags() == {"watched/0": 20}
    source.note_settled({"watched/0": 10})
    reader = Consumer({"bootstrap.servers": kafka.brokers, "group.id": "monitors"})
    deadline = time.monotonic() + 30
    while reader.committed([TopicPartition("watched", 0)], timeout=10)[0].offset != 10:
        assert time.monotonic() < deadline
        source.read(1, 0.1)
    reader.close()


def test_bad_input_is_refused_by_name(
    kafka: MockKafka, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFound, match=r"data\.stream\.kafka\.topics: the brokers .* have no topic nothing"):
        opened("nothing").find(is_begun=False, done_to="")
    with pytest.raises(InvalidArgument, match=r'kafka\.options: No such configuration property: "no\.such"'):
        opened("plain", options={"no.such": 1})
    (tmp_path / "options").write_text("# of a cluster\nsasl.password=hidden\n\nwrong\n")
    with pytest.raises(InvalidArgument, match=r"options_file: .*options, line 4: is no NAME=VALUE") as refused:
        opened("plain", options_file=str(tmp_path / "options"))
    assert "hidden" not in str(refused.value)
    with pytest.raises(ValueError, match=r"sasl\.password: is a secret, which a job file shows"):
        opened("plain", options={"sasl.password": "hidden"})
    with pytest.raises(ValueError, match=r"auto\.offset\.reset: is not possible; allowed: start and on_lost"):
        opened("plain", options={"auto.offset.reset": "latest"})
    monkeypatch.setattr("sparserow.worker.data.sources.kafka._CALL_SEC", 1.0)
    silent = opened("plain", options={"socket.timeout.ms": 1_000})
    kafka.stop_broker(1)
    with pytest.raises(Unavailable, match=r"data\.stream\.kafka: "):
        silent.find(is_begun=False, done_to="")
    kafka.start_broker(1)


def test_dead_letters_that_cannot_be_kept_end_the_job(
    kafka: MockKafka, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparserow.worker.data.sources.kafka._BURY_SEC", 1.0)
    source = opened("plain", dead_letters="graves")
    kafka.stop_broker(1)
    with pytest.raises(Unavailable, match=r"dead_letters: graves: no answer within 1 s"):
        source.bury([DeadEvent("plain/0, offset 1", "a reason", b"x")])
    kafka.start_broker(1)


def test_a_partition_that_is_held_loses_nothing(kafka: MockKafka, opened: Opened) -> None:
    kafka.create("held", 2)
    kafka.produce("held", {0: map(event, range(2_000)), 1: map(event, range(2_000, 2_010))})
    source = opened("held", until="latest")
    for part in source.find(is_begun=False, done_to=""):
        source.open(part.name, part.first, part.end)
    first = read(source, lambda found: any(events.part == "held/0" for events in found))
    source.hold(["held/0"])
    rest = read(source, lambda found: has_all_of_one(found + first))
    held = [events for events in rest if events.part == "held/0"]
    assert held == []
    source.hold([])
    end = read(source, lambda found: any(events.part == "held/0" and events.is_end for events in found))
    assert sorted(numbers(first + rest + end)) == list(range(2_010))


def has_all_of_one(found: list[PartEvents]) -> bool:
    return sum(number >= 2_000 for number in numbers(found)) == 10
