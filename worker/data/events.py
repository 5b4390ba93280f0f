"""The seam between a job and a source of events without an end: topics of Kafka, or a folder that is followed.

A source has *parts*, such as partitions, each with events in an order. The position of a part is where the next reader
begins; only the source knows what the number means. Steps to add a source:

1. Write a class with the methods of :class:`EventSource` in a file of ``worker/data/sources``.
2. Add its section to ``proto/config/stream_config.py``, and its case to ``worker/training/event_sources.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .decoded import Lines


@dataclass(frozen=True)
class SourcePart:
    """A part that a source has.

    Attributes:
        name: its name, at most 1,024 characters.
        first: the position at which a job begins that has none of it.
        end: the position at which the run is done with it; None: it has no end.
        is_whole: whether it never grows, so that it is read once.
    """

    name: str
    first: int
    end: int | None = None
    is_whole: bool = False


@dataclass(frozen=True)
class DeadEvent:
    """An event that cannot be trained on.

    Attributes:
        place: where it is, for people: the topic, partition and offset, or the file and line.
        reason: why, as a sentence.
        value: its bytes; b"": they are where ``place`` says.
        key: its key; None: it has none.
        headers: what else names it, by header.
    """

    place: str
    reason: str
    value: bytes = b""
    key: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class PartEvents:
    """Neighbouring events of a part.

    Attributes:
        part: the name of the part.
        lines: the good events, in order.
        is_good: of each event, whether it is among ``lines``, (n) bool.
        ends: the position after each event, (n) int64, rising.
        dead: the events that cannot be trained on, by their place among the n.
        is_end: whether the part is read to its end with the last of them.
        lost: events before the first that the source has no longer.
        describe: returns one of the n as a dead event, with a reason.
        tail: the position behind the last of them up to which the part is known to have no other; 0: that of the last.
    """

    part: str
    lines: Lines
    is_good: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.int64]
    describe: Callable[[int, str], DeadEvent]
    dead: dict[int, DeadEvent] = field(default_factory=dict)
    is_end: bool = False
    lost: int = 0
    tail: int = 0

    @property
    def end(self) -> int:
        """The position behind all of them."""
        return max(self.tail, int(self.ends[-1]) if len(self.ends) else 0)

    @property
    def empty(self) -> int:
        """The number of events without a value."""
        return len(self.ends) - len(self.lines) - len(self.dead)

    def split(self, good: int) -> tuple[PartEvents, PartEvents]:
        """Returns the events up to a number of good ones, with those that are not good behind them, and the rest."""
        rest = np.flatnonzero(self.is_good)[good:]
        return self.cut(int(rest[0]) if len(rest) else len(self.ends))

    def cut(self, count: int) -> tuple[PartEvents, PartEvents]:
        """Returns the first ``count`` events, and the rest."""
        good = int(self.is_good[:count].sum())
        is_all = count == len(self.ends)
        first = PartEvents(
            self.part,
            self.lines.take(slice(0, good)),
            self.is_good[:count],
            self.ends[:count],
            self.describe,
            {at: dead for at, dead in self.dead.items() if at < count},
            self.is_end and is_all,
            self.lost,
            self.tail if is_all else 0,
        )
        rest = PartEvents(
            self.part,
            self.lines.take(slice(good, None)),
            self.is_good[count:],
            self.ends[count:],
            lambda at, reason: self.describe(at + count, reason),
            {at - count: dead for at, dead in self.dead.items() if at >= count},
            self.is_end,
            tail=self.tail,
        )
        return first, rest


class EventSource(Protocol):
    """Reads events of parts. An object belongs to one thread.

    Attributes:
        name: what is read, the same for all workers of a job and for its next start.
        most: how many parts one worker reads at once.
        find_sec: the time between two looks for new parts, in seconds.
        is_endless: whether the run goes on when all parts that were found are read.
    """

    name: str
    most: int
    find_sec: float
    is_endless: bool

    def find(self, *, is_begun: bool, done_to: str) -> Sequence[SourcePart]:
        """Returns the parts that there are.

        Args:
            is_begun: whether the job has positions already, so that a part without one is new.
            done_to: a whole part whose name does not sort behind this one was read.

        Raises:
            NotFound: a topic does not exist.
            Unavailable: the source cannot be reached.
        """

    def open(self, part: str, position: int, end: int | None) -> None:
        """Begins to read a part at a position, up to an end where there is one."""

    def close(self, part: str) -> None:
        """Reads a part no further."""

    def read(self, most: int, wait_sec: float) -> Sequence[PartEvents]:
        """Returns up to about ``most`` of the next events of the parts that are open; waits for the first ones.

        Raises:
            DataLoss: the source no longer has the events of a position, and they are not to be skipped.
            BadLine: an event is malformed, and such events are not skipped.
            Unavailable: the source cannot be reached.
        """

    def hold(self, parts: Collection[str]) -> None:
        """Reads these parts no further until the next call, which names others."""

    def lags(self) -> Mapping[str, int]:
        """Returns how many events of each open part are not read yet, as far as is known."""

    def note_settled(self, positions: Mapping[str, int]) -> None:
        """Notes the positions before which everything is applied, for monitors."""

    def bury(self, dead: Sequence[DeadEvent]) -> None:
        """Keeps events that cannot be trained on where the job says; returns when they are kept.

        Raises:
            Unavailable: they cannot be kept.
        """

    def stop(self) -> None:
        """Leaves the source."""
