"""What a worker that reads a stream asks of its coordinator, and the answer (stream_leases.py decides)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field

from ....proto.errors import not_allowed
from ....proto.request_bounds import MOST_STREAM_PARTS

WorkerKey = tuple[int, int]  # (worker id, epoch of its registration)

MOST_PARTS = MOST_STREAM_PARTS  # of one job
MOST_PLANNED = 1_024  # batches of one worker that are announced and not known to be applied
_MOST_POSITION = 1 << 62


@dataclass(frozen=True)
class EventCounts:
    """What became of the events of a stream, summed up.

    Attributes:
        events: events that were trained on.
        dead: events that went to the dead letters, or were left out where there are none.
        empty: events without a value.
        lost: events that the source had no longer when they were wanted.
        late: of the events, those whose time was before the watermark.
        ahead: of the events, those whose time lay too far ahead of the clock to move the watermark.
    """

    events: int = 0
    dead: int = 0
    empty: int = 0
    lost: int = 0
    late: int = 0
    ahead: int = 0

    def plus(self, other: EventCounts, sign: int = 1) -> EventCounts:
        """Returns the sums of both, or with sign -1 the differences."""
        return EventCounts(*(mine + sign * its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def check(self) -> None:
        """Raises InvalidArgument for a number that no batch can have."""
        for name, value in asdict(self).items():
            if not 0 <= value < _MOST_POSITION:
                raise not_allowed(f"planned.{name}", value, "[0, 2^62)")


NO_EVENTS = EventCounts()


@dataclass(frozen=True)
class PlannedBatch:
    """A batch that a worker is about to commit.

    Attributes:
        step: the step of its commit.
        ends: the position after it of each part that it reads from.
        ended: the parts that are read to their end by it.
        counts: what is counted when it is applied.
        times: the latest time of its events of each part, microseconds since 1970 in UTC.
    """

    step: int
    ends: Mapping[str, int]
    ended: Collection[str] = ()
    counts: EventCounts = NO_EVENTS
    times: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamPart:
    """A part that the source has.

    Attributes:
        name: its name.
        first: the position at which a job begins that has none of it.
        end: the position at which this run is done with it; None: it has no end.
        is_whole: whether it never grows, so that it is over for ever once it is read to its end.
    """

    name: str
    first: int
    end: int | None = None
    is_whole: bool = False


@dataclass(frozen=True)
class StreamRequest:
    """A request of a worker.

    Attributes:
        run: the id of the run; the ends of parts are those that a run finds.
        source: a text that describes what is read; it is the same for all workers.
        settled: the step of the last commit of this worker that is known to be applied; -1: none.
        planned: the batches that it is about to commit, at consecutive steps; they replace those from the same step on.
        found: the parts that the source has; a part that is not among them stays.
        given_back: parts that it will not read any further; all its commits from them are settled.
        most: how many parts it reads at once.
        lags: how many events of each of its parts are not read yet, as far as it knows.
        idle: those of its parts that have had no event for a while, for which the watermark does not wait.
    """

    run: str
    source: str
    settled: int
    planned: Sequence[PlannedBatch] = ()
    found: Sequence[StreamPart] = ()
    given_back: Collection[str] = ()
    most: int = MOST_PARTS
    lags: Mapping[str, int] = field(default_factory=dict)
    idle: Collection[str] = ()

    def check(self) -> None:
        """Raises InvalidArgument for a number that is out of range."""
        numbers = [value for part in self.found for value in (part.first, part.end or 0)]
        numbers += self.lags.values()
        for batch in self.planned:
            batch.counts.check()
            numbers += batch.ends.values()
            for time in batch.times.values():
                if not -_MOST_POSITION < time < _MOST_POSITION:
                    raise not_allowed("planned.times", time, "(-2^62, 2^62)")
        for number in numbers:
            if not 0 <= number < _MOST_POSITION:
                raise not_allowed("position", number, "[0, 2^62)")
        if not 0 < self.most <= MOST_PARTS:
            raise not_allowed("most", self.most, f"[1, {MOST_PARTS}]")
        if len(self.planned) > MOST_PLANNED:
            raise not_allowed("planned", len(self.planned), f"at most {MOST_PLANNED} batches")
        steps = [batch.step for batch in self.planned]
        if steps and steps != list(range(steps[0], steps[0] + len(steps))):
            raise not_allowed("planned.step", steps, "consecutive steps")


@dataclass(frozen=True)
class LeasedPart:
    """A part that a worker reads.

    Attributes:
        position: where it begins, or has come to as far as is known.
        end: where this run is done with it; None: it has no end.
        careful_until: up to this position events are read one by one, because a worker died in a batch before it.
        deaths: how many workers have died at this position, one event at a time.
    """

    position: int
    end: int | None = None
    careful_until: int = 0
    deaths: int = 0


@dataclass(frozen=True)
class StreamAnswer:
    """The answer to a worker.

    Attributes:
        parts: what it reads from now on, without those that an announced batch reads to their end.
        give_back: those of them that it is to give back, as another member has too few.
        is_over: whether every part that was found has been read to its end.
        done_to: a part that is whole and does not sort behind this name is not read again.
        counts: of all workers in this run.
        is_begun: whether the job has positions of this stream.
        watermark: the time up to which all parts are read, microseconds since 1970 in UTC; None: not known.
    """

    parts: Mapping[str, LeasedPart]
    give_back: tuple[str, ...] = ()
    is_over: bool = False
    done_to: str = ""
    counts: EventCounts = NO_EVENTS
    is_begun: bool = False
    watermark: int | None = None
