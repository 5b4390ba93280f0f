"""Topics of Kafka as a source of events, by librdkafka (the package ``confluent-kafka``).

Partitions are assigned by the leases of the job. No consumer group takes part: a group id, where the job names one,
serves commits of positions for monitors of lag alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....proto.config.stream_config import KafkaConfig, milliseconds_of
from ....proto.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from ....proto.extras import install_command
from ..bad_line import BadLine
from ..event_decoder import DecodedValues, EventDecoder
from ..events import DeadEvent, PartEvents, SourcePart

__all__ = ["KafkaSource"]

_log = logging.getLogger(__name__)
_CALL_SEC = 10.0
_DESCRIBE_SEC = 2.0  # brokers that do not know the question do not answer it
_OUTAGE_SEC = 300.0  # without an answer of any broker
_BURY_SEC = 60.0
_MONITORED_SEC = 5.0
_MOST_AT_ONCE = 100_000  # messages of one call, of which librdkafka makes a list
_FRAME_BYTES = 5  # a zero, and the number of a schema


class KafkaSource:
    """Reads topics; see :class:`~sparserow.worker.data.events.EventSource`.

    Args:
        config: the topics and how they are reached.
        decoder: decodes values.
        start: where a job without positions begins: "earliest", "latest" or a time.
        until: where the run ends: "latest", a time, or None.
        skips_lost: whether events that are gone are counted; False: they end the job.
        skips_bad: whether malformed events are counted, and kept as dead letters; False: the first ends the job.

    Raises:
        InvalidArgument: librdkafka refuses an option.
        FailedPrecondition: the package is not installed.
    """

    most = 4_096
    find_sec = 30.0

    def __init__(
        self,
        config: KafkaConfig,
        decoder: EventDecoder,
        *,
        start: str,
        until: str | None,
        skips_lost: bool,
        skips_bad: bool,
    ) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise FailedPrecondition(
                f"data.stream.kafka: confluent-kafka is not installed; install it with: {install_command('kafka')}"
            ) from None
        self._kafka = confluent_kafka
        self._config, self._decoder = config, decoder
        self.is_endless = until is None
        self._start, self._until = start, until
        self._skips_lost, self._skips_bad = skips_lost, skips_bad
        self.name = f"kafka {', '.join(config.topics)}"
        self._open: dict[str, int | None] = {}  # the end of each part that is read
        self._positions: dict[str, int] = {}
        self._lost: dict[str, int] = {}
        self._held: set[str] = set()
        self._known: set[str] = set()
        self._down_since: float | None = None
        self._failed: Exception | None = None
        self._monitored_at = 0.0
        self._producer: Any = None
        self._connection = {"bootstrap.servers": config.brokers, **config.options, **_options_of(config.options_file)}
        self._consumer = self._made(
            confluent_kafka.Consumer,
            {
                "isolation.level": "read_committed",
                **self._connection,
                "group.id": config.group or "sparserow",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
            },
        )

    def _made(self, kind: Any, options: dict[str, Any]) -> Any:
        try:
            return kind({"log_level": 3, **options, "error_cb": self._on_error, "logger": _log})
        except (self._kafka.KafkaException, ValueError, TypeError) as error:
            words = error.args[0].str() if isinstance(error, self._kafka.KafkaException) else error
            raise InvalidArgument(f"data.stream.kafka.options: {words}") from error

    def _on_error(self, error: Any) -> None:
        code = self._kafka.KafkaError
        if error.code() == code._ALL_BROKERS_DOWN:
            self._down_since = self._down_since or time.monotonic()
        elif error.code() in (code._AUTHENTICATION, code.SASL_AUTHENTICATION_FAILED) or error.fatal():
            self._failed = FailedPrecondition(f"data.stream.kafka: {self._config.brokers}: {error.str()}")

    def _check(self) -> None:
        """Raises what a broker has said of this client, and Unavailable when all are silent for long."""
        if self._failed is not None:
            raise self._failed
        if self._down_since is not None and time.monotonic() - self._down_since > _OUTAGE_SEC:
            raise Unavailable(
                f"data.stream.kafka: none of the brokers {self._config.brokers} has answered for {_OUTAGE_SEC:.0f} s"
            )

    # ---- parts

    def find(self, *, is_begun: bool, done_to: str) -> Sequence[SourcePart]:  # noqa: ARG002 - partitions are never whole
        """Returns the partitions of all topics; those that were found before are left out."""
        if not self._known and not self._config.compacted:
            self._refuse_compacted()
        found = []
        for topic in self._config.topics:
            for partition in self._partitions_of(topic):
                name = f"{topic}/{partition}"
                if name in self._known:
                    continue
                first = self._offset(topic, partition, "earliest" if is_begun else self._start)
                end = None if self._until is None else self._offset(topic, partition, self._until)
                found.append(SourcePart(name, first, end))
        self._known |= {part.name for part in found}
        return found

    def _refuse_compacted(self) -> None:
        """Raises FailedPrecondition for a topic whose brokers say that it is compacted."""
        from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]

        admin = self._made(AdminClient, self._connection)
        topics = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in self._config.topics]
        for topic, asked in admin.describe_configs(topics, request_timeout=_DESCRIBE_SEC).items():
            try:
                policy = asked.result(2 * _DESCRIBE_SEC).get("cleanup.policy")
            except (self._kafka.KafkaException, TimeoutError) as error:  # a client may have no right to ask
                _log.info("data.stream.kafka: whether %s is compacted is not known: %s", topic.name, error)
                continue
            if policy is not None and "compact" in str(policy.value):
                raise FailedPrecondition(
                    f"data.stream.kafka.topics: {topic.name} is compacted, so events are taken away before they are "
                    "read; set data.stream.kafka.compacted if that is meant"
                )

    def _partitions_of(self, topic: str) -> list[int]:
        metadata = self._called(lambda: self._consumer.list_topics(topic, timeout=_CALL_SEC).topics[topic])
        if metadata.error is not None:
            if metadata.error.code() == self._kafka.KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise NotFound(f"data.stream.kafka.topics: the brokers {self._config.brokers} have no topic {topic}")
            raise self._refusal(topic, metadata.error)
        return sorted(metadata.partitions)

    def _offset(self, topic: str, partition: int, at: str) -> int:
        """Returns an offset: the first one, the one behind the last, or the first of a time."""
        place = self._kafka.TopicPartition(topic, partition)
        low, high = self._called(lambda: self._consumer.get_watermark_offsets(place, timeout=_CALL_SEC))
        if at in ("earliest", "latest"):
            return int(low if at == "earliest" else high)
        place.offset = milliseconds_of(at)
        (of_time,) = self._called(lambda: self._consumer.offsets_for_times([place], timeout=_CALL_SEC))
        return int(of_time.offset if of_time.offset >= 0 else high)

    def _called(self, call: Any) -> Any:
        try:
            return call()
        except self._kafka.KafkaException as error:
            self._check()
            raise Unavailable(f"data.stream.kafka: {self._config.brokers}: {error.args[0].str()}") from error

    def _refusal(self, name: str, error: Any) -> Exception:
        kind = FailedPrecondition if "AUTHORIZATION" in error.name() else Unavailable
        return kind(f"data.stream.kafka: {name}: {error.str()}")

    def _place(self, part: str, offset: int) -> Any:
        topic, _, partition = part.rpartition("/")
        return self._kafka.TopicPartition(topic, int(partition), offset)

    def open(self, part: str, position: int, end: int | None) -> None:
        """Begins to read a partition at an offset."""
        self._open[part], self._positions[part] = end, position
        self._consumer.incremental_assign([self._place(part, position)])

    def close(self, part: str) -> None:
        """Reads a partition no further."""
        if part in self._open:
            del self._open[part]
            self._held.discard(part)
            self._consumer.incremental_unassign([self._place(part, 0)])

    # ---- events

    def read(self, most: int, wait_sec: float) -> Sequence[PartEvents]:
        """Returns the next events of the partitions that are open."""
        self._check()
        messages = self._called(lambda: self._consumer.consume(min(most, _MOST_AT_ONCE), wait_sec))
        by_part: dict[str, list[Any]] = {}
        tails: dict[str, int] = {}
        for message in messages:
            part = f"{message.topic()}/{message.partition()}"
            if part not in self._open:
                continue
            end = self._open[part]
            if message.error() is None:
                if end is not None and message.offset() >= end:
                    tails[part] = end
                else:
                    by_part.setdefault(part, []).append(message)
            elif message.error().code() == self._kafka.KafkaError._PARTITION_EOF:
                # It lies behind records that are no events, such as those of transactions.
                tails[part] = message.offset() if end is None else min(end, message.offset())
            else:
                self._on_gap(part, message)
            self._down_since = None
        parts = {part: by_part.get(part, []) for part in dict.fromkeys((*by_part, *tails)) if part in self._open}
        before = dict(self._positions)
        decoded = self._decoded([message for some in parts.values() for message in some])
        found, begin, good = [], 0, 0
        for part, some in parts.items():
            mine = decoded.cut(begin, begin + len(some), good)
            begin, good = begin + len(some), good + len(mine.lines)
            found.append(self._events(part, some, mine, tails.get(part, 0)))
        # A partition that is at its end says so again; a batch of nothing would be a commit.
        return [events for events in found if events.is_end or events.end > before[events.part]]

    def _decoded(self, messages: list[Any]) -> DecodedValues:
        """Decodes the messages of all partitions at once, as a call takes milliseconds, however few they are."""
        values = [message.value() for message in messages]
        has_value = np.fromiter((bool(value and not value.isspace()) for value in values), np.bool_, len(values))
        unframed = [self._unframed(value) for value, there in zip(values, has_value, strict=True) if there]
        found = self._decoder.decode(unframed, ", ".join(self._config.topics))
        is_good = has_value.copy()
        is_good[has_value] = found.is_good
        places = np.flatnonzero(has_value)
        return DecodedValues(found.lines, is_good, {int(places[at]): reason for at, reason in found.faults.items()})

    def _events(self, part: str, messages: list[Any], found: DecodedValues, tail: int) -> PartEvents:
        def describe(at: int, reason: str) -> DeadEvent:
            return _dead(messages[at], reason)

        dead = {at: describe(at, reason) for at, reason in found.faults.items()}
        if dead and not self._skips_bad:
            first = dead[min(dead)]
            raise BadLine(part, messages[min(dead)].offset(), None, first.reason, unit="offset")
        ends = np.fromiter((message.offset() + 1 for message in messages), np.int64, len(messages))
        end = self._open[part]
        reached = max(tail, int(ends[-1]) if len(ends) else 0, self._positions[part])
        self._positions[part] = reached
        is_end = end is not None and reached >= end
        lost = self._lost.pop(part, 0)
        return PartEvents(
            part, found.lines, found.is_good, ends, describe, dead, is_end=is_end, lost=lost, tail=reached
        )

    def _unframed(self, value: bytes) -> bytes:
        if self._config.framing == "none":
            return value
        return value[_FRAME_BYTES:] if value[:1] == b"\0" and len(value) > _FRAME_BYTES else b"\0"  # none has one

    def _on_gap(self, part: str, message: Any) -> None:
        """Goes on where there are events, or raises, after the broker has refused an offset."""
        error, code = message.error(), self._kafka.KafkaError
        if error.code() not in (code._AUTO_OFFSET_RESET, code.OFFSET_OUT_OF_RANGE):
            raise self._refusal(part, error)
        position, place = self._positions[part], self._place(part, 0)
        low, high = self._called(lambda: self._consumer.get_watermark_offsets(place, timeout=_CALL_SEC))
        what = (
            f"has no event before offset {low} any more"
            if position < low
            else f"ends at offset {high}, so it was made anew"
        )
        if not self._skips_lost:
            raise DataLoss(
                f"data.stream: {part} {what}, and the job was at {position}; with on_lost skip it goes on at {low}"
            )
        self._lost[part] = self._lost.get(part, 0) + max(0, low - position)
        _log.warning("data.stream: %s %s, and the job was at %d; it goes on at %d", part, what, position, low)
        end = self._open[part]
        self.close(part)
        self.open(part, low, end)

    def hold(self, parts: Collection[str]) -> None:
        """Reads these partitions no further until the next call."""
        wanted = self._open.keys() & set(parts)
        held, let_go = wanted - self._held, self._held - wanted
        self._held = wanted
        if held:
            self._consumer.pause([self._place(part, 0) for part in held])
        if let_go:
            self._consumer.resume([self._place(part, 0) for part in let_go])

    def lags(self) -> Mapping[str, int]:
        """Returns how many offsets of each partition lie before its last stable one, as of the last fetch."""
        lags = {}
        for part in self._open:
            with contextlib.suppress(self._kafka.KafkaException):
                _, high = self._consumer.get_watermark_offsets(self._place(part, 0), cached=True)
                lags[part] = max(0, high - self._positions[part])
        return lags

    def note_settled(self, positions: Mapping[str, int]) -> None:
        """Commits positions for monitors, where the job names a group; a refusal does no harm."""
        now = time.monotonic()
        if self._config.group is None or not positions or now - self._monitored_at < _MONITORED_SEC:
            return
        self._monitored_at = now
        offsets = [self._place(part, position) for part, position in positions.items()]
        with contextlib.suppress(self._kafka.KafkaException):
            self._consumer.commit(offsets=offsets, asynchronous=True)

    def bury(self, dead: Sequence[DeadEvent]) -> None:
        """Produces dead letters, and waits until the brokers have them."""
        topic = self._config.dead_letters
        if topic is None or not dead:
            return
        if self._producer is None:
            self._producer = self._made(self._kafka.Producer, {"enable.idempotence": True, **self._connection})
        refused: list[str] = []

        def on_delivery(error: Any, _: Any) -> None:
            if error is not None:
                refused.append(error.str())

        for event in dead:
            headers = {name: value.encode() for name, value in event.headers.items()}
            self._producer.produce(topic, event.value, event.key, headers=headers, on_delivery=on_delivery)
        left = self._producer.flush(_BURY_SEC)
        if left or refused:
            why = refused[0] if refused else f"no answer within {_BURY_SEC:.0f} s"
            raise Unavailable(f"data.stream.kafka.dead_letters: {topic}: {why}")

    def stop(self) -> None:
        """Closes the connections."""
        self._consumer.close()


def _dead(message: Any, reason: str) -> DeadEvent:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    place = f"{topic}/{partition}, offset {offset}"
    headers = {"topic": topic, "partition": str(partition), "offset": str(offset), "reason": reason}
    return DeadEvent(place, reason, message.value() or b"", message.key(), headers)


def _options_of(path: str | None) -> dict[str, str]:
    """Returns the options of a file of lines NAME=VALUE."""
    if path is None:
        return {}
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"data.stream.kafka.options_file: {path}: {error}") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise InvalidArgument(f"data.stream.kafka.options_file: {path}, line {number}: is no NAME=VALUE")
        found[name.strip()] = value.strip()
    return found
