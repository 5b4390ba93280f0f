"""The section ``data.stream`` of a job file: events that a job trains on as they come."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..errors import InvalidArgument
from ..options.path_text import Paths, PathText, one_or_several
from ..options.strict_model import Seconds, StrictModel

_OWN_OPTIONS = {
    "bootstrap.servers": "brokers",
    "group.id": "group",
    "enable.auto.commit": "no option, as positions move with commits of the job",
    "enable.auto.offset.store": "no option, as positions move with commits of the job",
    "enable.partition.eof": "no option",
    "auto.offset.reset": "start and on_lost",
}
_SECRETS = ("password", "secret", "token", "key.pem", "sasl.oauthbearer.config", "sasl.jaas")


def milliseconds_of(time: str) -> int:
    """Returns a time of ISO 8601, of UTC where it names no zone, as milliseconds since 1970.

    Raises:
        ValueError: it is no time.
    """
    found = datetime.fromisoformat(time)
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)


def _checked_time(value: str) -> str:
    try:
        milliseconds_of(value)
    except ValueError:
        raise InvalidArgument(f"{value!r} is no time; allowed: a time such as 2026-11-30T08:00:00Z") from None
    return value


EventTime = Annotated[str, AfterValidator(_checked_time)]
_TIME = {"allowed": "a time of ISO 8601"}


class ProtobufConfig(StrictModel):
    """Values of messages that are Protobuf, in place of JSON: with format jsonl, by the names of their fields."""

    descriptors: PathText = Field(
        min_length=1,
        description="File of descriptors, by path or URL, as protoc --descriptor_set_out --include_imports writes it.",
    )
    message: str = Field(
        min_length=1, max_length=511, description="Full name of the messages' type, such as shop.Click."
    )


class KafkaConfig(StrictModel):
    """Topics of Kafka, of which each message is an event."""

    brokers: str = Field(min_length=1, description="Brokers to begin with: HOST:PORT, with commas.")
    topics: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")], ...], BeforeValidator(one_or_several)
    ] = Field(
        min_length=1,
        max_length=64,
        description="Topics, of which all partitions are read.",
        json_schema_extra={"allowed": "a name, or a sequence of them, of letters, digits, . _ -"},
    )
    framing: Literal["none", "confluent"] = Field(
        "none",
        description="confluent: the 5 bytes by which a schema registry begins each value are left out. none: values "
        "have none.",
    )
    protobuf: ProtobufConfig | None = Field(
        None, description="How values are read that are Protobuf; null: they are texts of data.format."
    )
    dead_letters: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")] = Field(
        None,
        description="Topic that gets the events which cannot be trained on, with their topic, partition, offset and "
        "the reason as headers, each at least once. null: they are left out and counted. It needs on_bad_line skip.",
    )
    compacted: bool = Field(
        False,
        description="Whether a topic may be compacted, which takes older events of a key away before they are read. "
        "false: such a topic is refused, where the brokers say how a topic is kept.",
    )
    group: str | None = Field(
        None,
        min_length=1,
        max_length=255,
        description="Group id under which positions are committed for monitors of lag; nothing else uses them. null: "
        "none are.",
    )
    options: dict[str, str | int | float | bool] = Field(
        {},
        description="Options of librdkafka, such as security.protocol. Secrets belong in options_file.",
        json_schema_extra={"allowed": "a mapping of names to values"},
    )
    options_file: PathText | None = Field(
        None,
        min_length=1,
        description="File of lines NAME=VALUE with further options, such as sasl.password. Its values are shown "
        "nowhere. null: there is none.",
    )

    @model_validator(mode="after")
    def _no_secrets_in_sight(self) -> KafkaConfig:
        for name in self.options:
            if name in _OWN_OPTIONS:
                raise InvalidArgument(f"options.{name}: is not possible; allowed: {_OWN_OPTIONS[name]}")
            if any(part in name for part in _SECRETS):
                raise InvalidArgument(f"options.{name}: is a secret, which a job file shows; give it by options_file")
        return self


class FollowConfig(StrictModel):
    """Files that are written while the job runs, each of which is read once, in the order of their names."""

    files: PathText = Field(
        description="Pattern of their paths or URLs, such as s3://logs/dt=*/*.jsonl. A file is left out whose name "
        "sorts before one that was read.",
    )
    marker: str | None = Field(
        None,
        min_length=1,
        description="Name of a file, such as _SUCCESS, whose presence says that the files of its folder are whole; "
        "null: see age.",
    )
    age: Seconds = Field(
        60.0, ge=0, description="Without a marker, how long a file has not changed when it is taken to be whole."
    )
    every: Seconds = Field(5.0, gt=0, description="Time between two looks for new files.")


class EventTimeConfig(StrictModel):
    """What the times of events mean, which are those of the column timestamp of data.csv or data.columns.

    The watermark is the time up to which all partitions are read: the lowest of their latest times.
    """

    max_ahead: Seconds = Field(
        60.0,
        ge=0,
        description="How far ahead of the clock a time may lie; the watermark does not follow one that is further, as "
        "of a producer whose clock is wrong.",
    )
    idle_after: Seconds = Field(
        30.0, gt=0, description="How long a partition has no event until the watermark does not wait for it."
    )
    max_skew: Seconds | None = Field(
        None,
        gt=0,
        description="How far ahead of the watermark a partition is read, as while a job catches up; null: any time.",
    )


class StreamConfig(StrictModel):
    """A source of events without an end, in place of ``data.train``."""

    kafka: KafkaConfig | None = Field(None, description="Topics of Kafka; null: see follow.")
    follow: FollowConfig | None = Field(None, description="Files that are written while the job runs; null: see kafka.")
    like: Paths = Field(
        description="Files of events of the same format: types of columns and statistics of features are those of "
        "them. They are not trained on."
    )
    start: Literal["earliest", "latest"] | EventTime = Field(
        "earliest",
        description="Where a job begins that has no position yet: with the first event of each partition, behind the "
        "last one, or at a time. A job that is started again goes on where it was.",
        json_schema_extra={"allowed": "earliest, latest or a time of ISO 8601"},
    )
    until: Literal["latest"] | EventTime | None = Field(
        None,
        description="Where the run ends. latest: with the last event that exists when it begins. A time: with the last "
        "event before it. null: it does not end.",
        json_schema_extra={"allowed": "latest or a time of ISO 8601"},
    )
    event_time: EventTimeConfig | None = Field(
        None,
        description="What the times of events mean; null: they move nothing.",
        json_schema_extra={"allowed": "a section with max_ahead, idle_after and max_skew, {} for its defaults"},
    )
    max_wait: Seconds = Field(0.1, gt=0, le=60, description="How long a batch that is not full waits for events.")
    on_lost: Literal["error", "skip"] = Field(
        "error",
        description="What happens when the topic no longer has the events of a position, or was made anew. error: the "
        "job ends. skip: it goes on with the first event that there is, and counts what is lost.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> StreamConfig:
        if (self.kafka is None) == (self.follow is None):
            raise InvalidArgument("kafka: exactly one of kafka and follow is needed")
        if self.follow is not None:
            for name in ("start", "on_lost"):
                if name in self.model_fields_set:
                    raise InvalidArgument(
                        f"{name}: has no effect with follow, whose files are read as wholes; remove it"
                    )
            if self.until not in (None, "latest"):
                raise InvalidArgument("until: is latest or null with follow, whose files are read as wholes")
        return self
