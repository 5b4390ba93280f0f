"""What no mock cluster of Kafka does, by a scripted consumer: times, transactions, added partitions, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from sparserow.proto.config.stream_config import KafkaConfig
from sparserow.proto.errors import FailedPrecondition, Unavailable
from sparserow.worker.data.decoded import Lines
from sparserow.worker.data.event_decoder import DecodedValues
from sparserow.worker.data.sources.kafka import KafkaSource

confluent_kafka = pytest.importorskip("confluent_kafka", reason="the extra kafka is not installed")
from confluent_kafka import KafkaError, KafkaException, TopicPartition  # noqa: E402 - there is one
from confluent_kafka.admin import ConfigResource  # noqa: E402


class Numbers:
    """Decodes values that are numbers."""

    def decode(self, values: Sequence[bytes], name: str) -> DecodedValues:  # noqa: ARG002
        numbers = np.array([json.loads(value) for value in values], np.float64).reshape(-1, 1)
        lines = Lines(numbers, np.empty((len(values), 0), np.int64), np.zeros(len(values), np.float32))
        return DecodedValues(lines, np.ones(len(values), np.bool_), {})


@dataclass
class Message:
    """A message, or an error that comes in its place."""

    at: int
    body: bytes | None = None
    code: int | None = None
    part: int = 0

    def topic(self) -> str:
        return "clicks"

    def partition(self) -> int:
        return self.part

    def offset(self) -> int:
        return self.at

    def value(self) -> bytes | None:
        return self.body

    def key(self) -> None:
        return None

    def error(self) -> KafkaError | None:
        return None if self.code is None else KafkaError(self.code)


@dataclass
class Script:
    """What the consumer of the next source answers.

    Attributes:
        partitions: how many the topic has.
        marks: the first offset and the one behind the last, of each partition.
        of_times: the offset of a time in milliseconds; -1: it lies behind the last event.
        replies: what it consumes, call by call.
        refusal: the code of an error that the topic has.
        policy: how the brokers say that the topic is cleaned; None: they do not say.
    """

    partitions: int = 1
    marks: tuple[int, int] = (0, 10)
    of_times: Callable[[int], int] = lambda _: -1
    replies: list[list[Message]] = field(default_factory=list)
    refusal: int | None = None
    policy: str | None = None
    assigned: dict[int, int] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)

    def list_topics(self, topic: str, timeout: float) -> SimpleNamespace:  # noqa: ARG002
        error = None if self.refusal is None else KafkaError(self.refusal)
        return SimpleNamespace(
            topics={topic: SimpleNamespace(error=error, partitions=dict.fromkeys(range(self.partitions)))}
        )

    def get_watermark_offsets(self, place: TopicPartition, **_: object) -> tuple[int, int]:  # noqa: ARG002
        return self.marks

    def offsets_for_times(self, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:  # noqa: ARG002
        return [TopicPartition(place.topic, place.partition, self.of_times(place.offset)) for place in places]

    def incremental_assign(self, places: list[TopicPartition]) -> None:
        self.assigned |= {place.partition: place.offset for place in places}

    def incremental_unassign(self, places: list[TopicPartition]) -> None:
        for place in places:
            del self.assigned[place.partition]

    def consume(self, most: int, wait: float) -> list[Message]:  # noqa: ARG002
        return self.replies.pop(0) if self.replies else []

    def describe_configs(self, topics: list[ConfigResource], request_timeout: float) -> dict[ConfigResource, Future]:  # noqa: ARG002
        answer: Future[dict[str, SimpleNamespace]] = Future()
        if self.policy is None:
            answer.set_exception(KafkaException(KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED)))
        else:
            answer.set_result({"cleanup.policy": SimpleNamespace(value=self.policy)})
        return dict.fromkeys(topics, answer)

    def close(self) -> None:
        """Nothing is open."""


def opened(monkeypatch: pytest.MonkeyPatch, script: Script, **given: object) -> KafkaSource:
    def made(options: dict[str, object]) -> Script:
        script.options = options
        return script

    monkeypatch.setattr(confluent_kafka, "Consumer", made)
    monkeypatch.setattr("confluent_kafka.admin.AdminClient", lambda _: script)
    options = {"start": "earliest", "until": None, "skips_lost": False, "skips_bad": True, **given}
    is_compacted = bool(options.pop("compacted", False))
    return KafkaSource(KafkaConfig(brokers="b:1", topics=("clicks",), compacted=is_compacted), Numbers(), **options)


def test_a_job_begins_and_ends_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def of_times(milliseconds: int) -> int:
        asked.append(milliseconds)
        return 4 if milliseconds < 1_780_000_000_000 else -1

    script = Script(of_times=of_times)
    source = opened(monkeypatch, script, start="2026-05-01T00:00:00Z", until="2026-12-01T00:00:00+00:00")
    (part,) = source.find(is_begun=False, done_to="")
    assert (part.first, part.end) == (4, 10)  # behind the last event: where it ends now
    assert asked == [1_777_593_600_000, 1_796_083_200_000]
    assert not source.is_endless


def test_partitions_that_are_added_begin_at_their_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(marks=(3, 10))
    source = opened(monkeypatch, script, start="latest")
    assert [(part.name, part.first) for part in source.find(is_begun=False, done_to="")] == [("clicks/0", 10)]
    script.partitions = 3
    found = source.find(is_begun=True, done_to="")
    assert [(part.name, part.first) for part in found] == [("clicks/1", 3), ("clicks/2", 3)]


def test_records_of_transactions_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Message(10, code=KafkaError._PARTITION_EOF)
    script = Script(replies=[[Message(0, b"1"), Message(3, b"2")], [Message(4, b"3"), end]])
    source = opened(monkeypatch, script, until="latest")
    assert script.options["isolation.level"] == "read_committed"
    source.open("clicks/0", 0, 10)
    (first,) = source.read(10, 0.0)
    assert (first.ends.tolist(), first.end, first.is_end) == ([1, 4], 4, False)
    (second,) = source.read(10, 0.0)
    # Offsets 5 to 9 are markers and aborted records, which no consumer gets.
    assert (second.ends.tolist(), second.end, second.is_end) == ([5], 10, True)


def test_a_partition_that_is_read_makes_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Message(5, code=KafkaError._PARTITION_EOF)
    source = opened(monkeypatch, Script(replies=[[Message(4, b"1")], [end], [end], [Message(7, b"2")]]))
    source.open("clicks/0", 4, None)
    assert [len(events.ends) for events in source.read(10, 0.0)] == [1]
    assert source.read(10, 0.0) == source.read(10, 0.0) == []
    assert [events.end for events in source.read(10, 0.0)] == [8]


def test_an_end_without_events_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(replies=[[Message(10, code=KafkaError._PARTITION_EOF)]])
    source = opened(monkeypatch, script, until="latest")
    source.open("clicks/0", 7, 10)
    (only,) = source.read(10, 0.0)
    assert (len(only.ends), only.end, only.is_end) == (0, 10, True)


def test_messages_of_a_partition_that_was_given_back_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(replies=[[Message(0, b"1", part=0), Message(0, b"2", part=1)]])
    source = opened(monkeypatch, script)
    source.open("clicks/0", 0, None)
    source.open("clicks/1", 0, None)
    source.close("clicks/1")
    assert script.assigned == {0: 0}
    assert [events.part for events in source.read(10, 0.0)] == ["clicks/0"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, FailedPrecondition),
        (KafkaError._UNKNOWN_PARTITION, Unavailable),
    ],
)
def test_a_refusal_ends_the_job_with_its_reason(monkeypatch: pytest.MonkeyPatch, code: int, kind: type) -> None:
    source = opened(monkeypatch, Script(refusal=code))
    with pytest.raises(kind, match=r"data\.stream\.kafka: clicks: "):
        source.find(is_begun=False, done_to="")
    source = opened(monkeypatch, Script(replies=[[Message(0, code=code)]]))
    source.open("clicks/0", 0, None)
    with pytest.raises(kind, match=r"data\.stream\.kafka: clicks/0: "):
        source.read(10, 0.0)


def test_silent_brokers_end_the_job_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    source = opened(monkeypatch, script)
    source.open("clicks/0", 0, None)
    on_error = script.options["error_cb"]
    assert callable(on_error)
    on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    assert source.read(10, 0.0) == []
    monkeypatch.setattr("sparserow.worker.data.sources.kafka._OUTAGE_SEC", 0.0)
    with pytest.raises(Unavailable, match="none of the brokers b:1 has answered"):
        source.read(10, 0.0)
    on_error(KafkaError(KafkaError._AUTHENTICATION))
    with pytest.raises(FailedPrecondition, match="b:1"):
        source.read(10, 0.0)


def test_a_compacted_topic_is_refused_unless_it_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailedPrecondition, match="clicks is compacted, so events are taken away before they are read"):
        opened(monkeypatch, Script(policy="compact,delete")).find(is_begun=False, done_to="")
    for script, compacted in ((Script(policy="compact"), True), (Script(policy="delete"), False), (Script(), False)):
        assert len(opened(monkeypatch, script, compacted=compacted).find(is_begun=False, done_to="")) == 1
