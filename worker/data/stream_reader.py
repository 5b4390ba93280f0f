"""Reads the events of a stream that the coordinator leases to this worker, each for one commit.

Before a batch is yielded, the coordinator knows the step of its commit and how far it reads each part. When this worker
dies, the step of its last applied commit says where the next one goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol

import numpy as np

from ...proto import control_pb2 as pb
from ...proto.errors import InvalidArgument
from .decoded import concatenate
from .event_clock import EventClock
from .events import DeadEvent, EventSource, PartEvents, SourcePart
from .leased import EpochScore, Leased, Trained
from .reader import ClickReader, Made

_AHEAD = 16  # batches that are announced at once, where there are as many events
_IDLE_SEC = 1.0  # between two requests without a batch
_DEATHS = 2  # of workers at an event that was read alone, after one in a batch with others


@dataclass
class StreamBatch:
    """A batch, before it is made.

    Attributes:
        pieces: its events by part; a part may come several times.
        times: the latest time of its events of each part, microseconds since 1970 in UTC.
        late: the number of its events before the watermark.
        ahead: the number of its events too far ahead of the clock.
    """

    pieces: list[PartEvents] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)
    late: int = 0
    ahead: int = 0

    def note_times(self, clock: EventClock) -> None:
        """Sets what the times of its events say."""
        for piece in self.pieces:
            found = clock.times_of(piece)
            self.late += found.late
            self.ahead += found.ahead
            if found.reached is not None:
                self.times[piece.part] = max(found.reached, self.times.get(piece.part, found.reached))

    @property
    def events(self) -> int:
        """The number of events that are trained on."""
        return sum(len(piece.lines) for piece in self.pieces)

    @property
    def counts(self) -> pb.StreamCounts:
        """What is counted when it is applied."""
        pieces = self.pieces
        return pb.StreamCounts(
            events=self.events,
            dead=sum(len(piece.dead) for piece in pieces),
            empty=sum(piece.empty for piece in pieces),
            lost=sum(piece.lost for piece in pieces),
            late=self.late,
            ahead=self.ahead,
        )

    @property
    def ends(self) -> dict[str, int]:
        """The position behind the batch of each part."""
        return {piece.part: piece.end for piece in self.pieces}

    @property
    def ended(self) -> list[str]:
        """The parts that are read to their end by it."""
        return [piece.part for piece in self.pieces if piece.is_end]

    @property
    def dead(self) -> list[DeadEvent]:
        """The events that are not trained on."""
        return [dead for piece in self.pieces for dead in piece.dead.values()]

    def buried(self, reason: str) -> list[DeadEvent]:
        """Returns its good events as dead ones."""
        return [
            piece.describe(at, reason) for piece in self.pieces for at, is_good in enumerate(piece.is_good) if is_good
        ]


class StreamLeases(Protocol):
    """A source of leased parts, such as the coordinator."""

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
        """Announces batches at the steps from ``settled`` + 1 on, and asks for parts.

        Raises:
            Fenced: this worker has left its job.
            FailedPrecondition, InvalidArgument: the coordinator refuses what it asks.
            Unavailable: the coordinator cannot be reached.
        """


class Meeting(Protocol):
    """Has the workers of a job take as many steps as each other, where they have to."""

    def __call__(self, batches: int, *, is_over: bool) -> tuple[int, bool]:
        """Returns how many steps this worker takes before the next call, and whether the run is over.

        Args:
            batches: the number of batches that it has.
            is_over: whether it knows that no event is left.
        """


class StreamReader(Generic[Made]):
    """An iterable of batches; one ``iter()`` reads a run. Not thread-safe.

    Before the caller asks for the next batch, it must have sent the commit of the last one, as the next of its steps.

    Args:
        reader: makes batches of decoded events; it has the batch size and the features.
        source: the events.
        leases: the source of parts.
        settle: returns the step of this worker's last commit when all its commits are acknowledged.
        max_wait: how long a batch that is not full waits for events, in seconds.
        meet: says how many steps this worker takes; those for which it has no batch get empty ones.
        clock: follows the times of events; None: they mean nothing.
    """

    def __init__(
        self,
        reader: ClickReader[Made],
        source: EventSource,
        *,
        leases: StreamLeases,
        settle: Callable[[], int],
        max_wait: float,
        meet: Meeting,
        clock: EventClock | None = None,
    ) -> None:
        self._reader, self._source, self._leases, self._settle = reader, source, leases, settle
        self._max_wait, self._meet, self._clock = max_wait, meet, clock
        self._size = reader.options.batch_size
        self._is_waited_for = False  # whether another worker has more batches than this one
        self._careful: dict[str, pb.LeasedPart] = {}  # parts of which events are read one by one
        self._open: set[str] = set()
        self._last = StreamBatch()
        self._pending: deque[PartEvents] = deque()
        self._sums: Callable[[], Trained] = Trained
        self._counts = pb.StreamCounts()
        self._is_over = False

    # ---- as of a reader that checkpoints keep

    def state_dict(self) -> dict[str, Any]:
        """Returns what is read and by how many workers; the positions are in the coordinator's part of a checkpoint."""
        options = self._reader.options
        return {"stream": self._source.name, "rank": options.rank, "world": options.world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: the coordinator has restored the positions."""
        self.check_state_dicts([state])

    def goes_on_from(self, state: dict[str, Any] | None) -> bool:
        """Returns whether there were as many workers as now.

        Raises:
            InvalidArgument: the state is of a reader of files.
        """
        if state is None:
            return False
        self.check_state_dicts([state])
        options = self._reader.options
        return (state["rank"], state["world"]) == (options.rank, options.world)

    def check_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Raises InvalidArgument for a state of a reader of files, whose place in the data a stream has not."""
        if any("stream" not in state for state in states):
            raise InvalidArgument(
                "data.stream: the checkpoint is of a job that reads data.train; begin from it with --from, in another "
                "folder of checkpoints"
            )

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Does nothing, as :meth:`load_state_dict`."""
        self.check_state_dicts(states)

    # ---- as of a LeasedReader

    @property
    def done(self) -> float | None:
        """The share of the run that is done: not known."""
        return None

    @property
    def came_late(self) -> bool:
        """Whether a later epoch was under way: a stream has one."""
        return False

    @property
    def end(self) -> Leased | None:
        """The sums of all workers at the end of the run; None before it."""
        if not self._is_over:
            return None
        mine = self._sums()
        events = self._counts.events
        seconds = mine.seconds * events / max(1, mine.samples)  # of all workers, which this one takes to be alike
        return Leased(None, is_over=True, epoch=1, trained=Trained(events, mine.measured, mine.loss_sum, seconds))

    @property
    def watermark(self) -> int | None:
        """The time up to which all workers have read all parts, microseconds since 1970 in UTC; None: not known."""
        return None if self._clock is None else self._clock.watermark

    def outcome(self) -> dict[str, int]:
        """Returns what became of the events that all workers have read in this run, as of the last answer."""
        counts = self._counts
        found = {"events": counts.events, "dead": counts.dead, "empty": counts.empty, "lost": counts.lost}
        return found if self._clock is None else {**found, "late": counts.late, "ahead": counts.ahead}

    def begin_at(self, epoch: int, sums: Callable[[], Trained] = Trained) -> None:  # noqa: ARG002 - there is one
        """Sets what gives this worker's sums over the run so far."""
        self._sums = sums

    def report_tested(self, tested: EpochScore) -> None:
        """Does nothing: a stream has no epochs whose figures late workers would ask for."""

    def note_refused(self) -> None:
        """Has the events of the last batch kept as dead ones, whose step was refused; its position moves on."""
        self._source.bury(self._last.buried("its batch gave a loss or gradients that are not finite"))

    # ---- reading

    def __iter__(self) -> Iterator[Made]:
        given = self._leases.lease(settled=self._settle(), planned=(), found=(), given_back=(), lags={}, idle=())
        self._counts = given.counts
        is_begun, find_at, ask_at = given.is_begun, 0.0, 0.0
        give_back: Sequence[str] = ()
        try:
            while True:
                found: Sequence[SourcePart] = ()
                if time.monotonic() >= find_at:
                    found = self._source.find(is_begun=is_begun, done_to=given.done_to)
                    is_begun, find_at = True, time.monotonic() + self._source.find_sec
                self._read()
                batches = self._batches()
                if batches or found or give_back or time.monotonic() >= ask_at:
                    self._bury(batches)
                    given = self._ask(batches, found, give_back)
                    give_back = self._take(given)
                    ask_at = time.monotonic() + _IDLE_SEC
                is_over = given.is_over and not self._source.is_endless and not batches and not self._pending
                steps, self._is_over = self._meet(len(batches), is_over=is_over)
                self._is_waited_for = steps > max(1, len(batches))
                for batch in batches:
                    self._last = batch
                    yield self._made(batch)
                for _ in range(steps - len(batches)):
                    self._last = StreamBatch()
                    yield self._reader.empty_batch()
                if self._is_over:
                    return
        finally:
            self._source.stop()

    def _read(self) -> None:
        """Takes events of the source, as many as are announced at once, and waits for the first ones."""
        waiting = self._waiting()
        room = self._size * _AHEAD - waiting
        if waiting < self._size:
            self._take_events(self._size - waiting, 0.0 if self._is_waited_for else self._max_wait)
            if self._waiting() < self._size:  # the source has no more of them
                return
        if room > self._size:
            self._take_events(room - self._size, 0.0)

    def _waiting(self) -> int:
        return sum(len(piece.ends) for piece in self._pending)

    def _take_events(self, most: int, wait_sec: float) -> None:
        if self._clock is not None:
            self._source.hold(self._clock.waiting())
        for piece in self._source.read(most, wait_sec):
            if self._clock is not None:
                self._clock.note(piece)
            if piece.is_end:
                self._source.close(piece.part)
            self._pending.append(piece)

    def _batches(self) -> list[StreamBatch]:
        """Cuts what has been read into batches."""
        batches: list[StreamBatch] = []
        batch = StreamBatch()
        while self._pending and len(batches) < _AHEAD:
            piece = self._pending.popleft()
            if self._is_careful(piece):
                if batch.pieces:
                    batches.append(batch)
                    batch = StreamBatch()
                alone, rest = piece.cut(1)
                batches.append(StreamBatch([self._checked(alone)]))
            else:
                first, rest = piece.split(self._size - batch.events)
                batch.pieces.append(first)
                if batch.events == self._size:
                    batches.append(batch)
                    batch = StreamBatch()
            if len(rest.ends):
                self._pending.appendleft(rest)
        if batch.pieces:
            batches.append(batch)
        if self._clock is not None:
            for batch in batches:
                batch.note_times(self._clock)
        return batches

    def _is_careful(self, piece: PartEvents) -> bool:
        part = self._careful.get(piece.part)
        if part is None or not len(piece.ends):
            return False
        if int(piece.ends[0]) <= part.careful_until:
            return True
        del self._careful[piece.part]
        return False

    def _checked(self, alone: PartEvents) -> PartEvents:
        """Returns an event that is read alone; one at which workers died again and again is dead."""
        part = self._careful[alone.part]
        if part.deaths < _DEATHS or not len(alone.lines):
            return alone
        part.deaths = 0  # of the events behind it
        dead = alone.describe(0, f"{_DEATHS + 1} workers died at it")
        return replace(alone, lines=alone.lines.take(slice(0, 0)), is_good=np.zeros(1, np.bool_), dead={0: dead})

    def _bury(self, batches: Sequence[StreamBatch]) -> None:
        """Keeps dead events before the position moves over them: at least once."""
        dead = [each for batch in batches for each in batch.dead]
        if dead:
            self._source.bury(dead)

    def _ask(
        self, batches: Sequence[StreamBatch], found: Sequence[SourcePart], give_back: Sequence[str]
    ) -> pb.LeaseStreamReply:
        settled, lags = self._settle(), self._source.lags()
        given = self._leases.lease(
            settled=settled,
            planned=batches,
            found=found,
            given_back=give_back,
            lags=lags,
            idle=() if self._clock is None else self._clock.idle(lags),
        )
        self._counts = given.counts
        if self._clock is not None and given.HasField("watermark"):
            self._clock.watermark = given.watermark
        self._source.note_settled({part.name: part.position for part in given.parts})
        return given

    def _take(self, given: pb.LeaseStreamReply) -> Sequence[str]:
        """Opens the parts that are new, closes those that are gone, and returns those to give back."""
        for name in self._open - {part.name for part in given.parts}:
            self._drop(name)
        for part in given.parts:
            if part.name in self._open:
                continue
            self._open.add(part.name)
            if self._clock is not None:
                self._clock.open(part.name)
            if part.position < part.careful_until:
                self._careful[part.name] = part
            self._source.open(part.name, part.position, part.end if part.HasField("end") else None)
        for name in given.give_back:  # the next request says so, when all that was announced of it is applied
            self._drop(name)
        return tuple(given.give_back)

    def _drop(self, name: str) -> None:
        self._open.discard(name)
        if self._clock is not None:
            self._clock.close(name)
        self._careful.pop(name, None)
        self._source.close(name)
        self._pending = deque(piece for piece in self._pending if piece.part != name)

    def _made(self, batch: StreamBatch) -> Made:
        found = [piece.lines for piece in batch.pieces if len(piece.lines)]
        return self._reader.made_of(concatenate(found)) if found else self._reader.empty_batch()
