"""Decides which worker reads which part of a stream, and from where. The module does no I/O and is not thread-safe.

A part is a partition of a topic or a file of a followed folder; its position is where the next reader begins. Before a
worker commits a batch it announces the step of that commit and how far the batch reads each part. The step that a
worker is known to have committed last therefore says its positions, however large its batches were.

Invariants:
 1. A part is leased to at most one member of the job.
 2. The position of a part moves over a batch only when the commit of that batch is known to be applied: its worker said
    so, or the operation that fences the worker found its last step.
 3. A batch is announced before its commit is sent, so no applied commit lacks its positions.
 4. What is counted of a batch (events, dead letters) is counted when its positions move, so once.

A partition grows for ever. A file is whole when it is found: it is read once, and forgotten when all files whose names
sort before it are read too, so that the state does not grow with the files of the past.

The watermark is the lowest of the latest times of the parts, as far as their batches are applied; it does not go back.
It waits for each partition that has not said a time, unless its reader finds it idle.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ....proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from .stream_requests import (
    MOST_PARTS,
    MOST_PLANNED,
    NO_EVENTS,
    EventCounts,
    LeasedPart,
    PlannedBatch,
    StreamAnswer,
    StreamPart,
    StreamRequest,
    WorkerKey,
)


@dataclass
class _Part:
    position: int
    end: int | None = None
    is_whole: bool = False
    is_over: bool = False
    holder: WorkerKey | None = None
    careful_until: int = 0
    deaths: int = 0
    lag: int = 0
    time: int | None = None  # the latest of its events
    is_idle: bool = False
    is_found: bool = True  # whether the run reads it; a topic that the job names no more has a position all the same


@dataclass
class JobStream:
    """The stream of one job.

    Attributes:
        run: the id of the run; empty after a restore, until a run asks.
        generation: the generation of the job when it last asked.
        source: a text that describes what is read.
        counts: of what was applied.
        before: those of earlier runs among them.
        done_to: the last of the names up to which all files are read; "": there is none.
        watermark: the time up to which all parts are read, microseconds since 1970 in UTC; None: not known.
    """

    run: str
    generation: int
    source: str
    counts: EventCounts = NO_EVENTS
    before: EventCounts = NO_EVENTS
    done_to: str = ""
    watermark: int | None = None
    _parts: dict[str, _Part] = field(default_factory=dict)
    _planned: dict[WorkerKey, list[PlannedBatch]] = field(default_factory=dict)
    # These index the parts to read by who has them, because an answer then looks only at its worker's parts.
    _free: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    _own: dict[WorkerKey, set[str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    # The lowest time of each worker's parts, because an answer then looks only at its worker's parts; None: not known.
    _low: dict[WorkerKey, float | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, part in self._parts.items():
            if not part.is_over and (part.is_found or part.holder is not None):
                self._among(part.holder).add(name)

    def _among(self, holder: WorkerKey | None) -> set[str]:
        return self._free if holder is None else self._own.setdefault(holder, set())

    def _move(self, name: str, holder: WorkerKey | None, *, is_over: bool = False) -> None:
        """Gives a part to a worker, or to none."""
        part = self._parts[name]
        self._among(part.holder).discard(name)
        part.holder, part.is_over = holder, is_over
        if not is_over and (part.is_found or holder is not None):
            self._among(holder).add(name)

    @property
    def is_read(self) -> bool:
        """Whether a worker has a lease."""
        return any(self._own.values())

    @property
    def lag(self) -> int:
        """How many events are not read yet, as far as the workers know."""
        return sum(part.lag for part in list(self._parts.values()))  # other threads look at it

    @property
    def positions(self) -> dict[str, int]:
        """The position of each part, by name."""
        return {name: part.position for name, part in self._parts.items()}

    def left(self, holder: WorkerKey, last_step: int, *, is_orderly: bool = False) -> None:
        """Ends the leases of a worker that is gone; none of its later messages counts.

        Args:
            holder: the worker.
            last_step: the step of its last commit on any shard; -1 when there is none.
            is_orderly: whether it has left by itself.
        """
        self._apply(holder, last_step)
        left = self._planned.pop(holder, [])
        for name in list(self._among(holder)):
            part = self._parts[name]
            self._move(name, None)
            reached = max((batch.ends[name] for batch in left if name in batch.ends), default=part.position)
            if not is_orderly and reached > part.position:
                part.deaths += part.careful_until > part.position
                part.careful_until = max(part.careful_until, reached)
        self._own.pop(holder, None)
        self._low.pop(holder, None)

    def _apply(self, holder: WorkerKey, last_step: int) -> None:
        """Moves the positions over the batches of a worker up to a step."""
        planned = self._planned.get(holder, [])
        done = [batch for batch in planned if batch.step <= last_step]
        for batch in done:
            self.counts = self.counts.plus(batch.counts)
            for name, end in batch.ends.items():
                part = self._parts[name]
                if end > part.position:
                    part.deaths = 0
                part.position = max(part.position, end)
                if name in batch.times:
                    part.time = batch.times[name] if part.time is None else max(part.time, batch.times[name])
                if name in batch.ended:
                    self._move(name, None, is_over=True)
        if not done:
            return
        self._planned[holder] = planned[len(done) :]
        if any(batch.ended for batch in done):
            self._forget()

    def _forget(self) -> None:
        """Forgets the files that are read, up to the first that is not, and those before it that are gone."""
        for name in sorted(name for name, part in self._parts.items() if part.is_whole):
            if self._parts[name].is_found and not self._parts[name].is_over:
                return
            del self._parts[name]
            self.done_to = name

    def answer(
        self, request: StreamRequest, holder: WorkerKey, members: Sequence[WorkerKey], known: Collection[WorkerKey]
    ) -> StreamAnswer:
        """Notes what a worker reports, and leases parts to it.

        Args:
            request: the request of the worker.
            holder: the worker that asks.
            members: the members of the job, in one order for all; they share the parts evenly.
            known: the members, and those whose end the shards do not know yet.

        Raises:
            FailedPrecondition: other workers read another source, or a batch reads a part of another worker.
            InvalidArgument: there are too many parts.
        """
        if request.source != self.source:
            if self.is_read:
                raise FailedPrecondition(
                    f"data.stream: other workers of this job read {self.source}, and this one {request.source}"
                )
            self._change_source(request.source)
        for gone in self._own.keys() - known:
            self.left(gone, -1)
        self._apply(holder, request.settled)
        if request.run != self.run:  # a run reads the parts that it finds, to the ends that it says
            self.run, self.before = request.run, self.counts
            for part in self._parts.values():
                part.end, part.is_found, part.lag = None, False, 0
            self._free.clear()
        self._find(request.found)
        self._plan(request.planned, holder)
        for name, lag in request.lags.items():
            if name in self._parts and self._parts[name].holder == holder:
                self._parts[name].lag = lag
        for name in request.given_back:
            if name in self._parts and self._parts[name].holder == holder:
                self._move(name, None)
        given = self._lease(request.most, holder, members)
        return replace(given, watermark=self._watermark_with(holder, request.idle))

    def _watermark_with(self, holder: WorkerKey, idle: Collection[str]) -> int | None:
        """Notes which parts of a worker are idle, and returns the watermark."""
        own = self._among(holder)
        for name in own:
            self._parts[name].is_idle = name in idle
        self._low[holder] = self._lowest(own)
        lows = [self._low.get(other) for other, parts in self._own.items() if parts]
        lows.append(self._lowest(self._free))
        if None not in lows and (lowest := min(low for low in lows if low is not None)) < math.inf:
            self.watermark = int(lowest if self.watermark is None else max(self.watermark, lowest))
        return self.watermark

    def _lowest(self, names: Collection[str]) -> float | None:
        """Returns the lowest time of some parts; infinity: they hold nothing up; None: one has not said its time."""
        lowest = math.inf
        for name in names:
            part = self._parts[name]
            if part.is_idle or (part.time is None and part.is_whole):
                continue
            if part.time is None:
                return None
            lowest = min(lowest, part.time)
        return lowest

    def _change_source(self, source: str) -> None:
        """Keeps the positions of partitions, which have names of their own; an order of files is of one pattern."""
        self.source, self.done_to, self.watermark, self._planned = source, "", None, {}
        self._parts = {name: part for name, part in self._parts.items() if not part.is_whole}
        self._free.intersection_update(self._parts)

    def _find(self, found: Sequence[StreamPart]) -> None:
        count = len(self._parts.keys() | {each.name for each in found if each.name > self.done_to or not each.is_whole})
        if count > MOST_PARTS:
            raise InvalidArgument(
                f"data.stream: {count} partitions or files that are not read yet; allowed: at most {MOST_PARTS}"
            )
        for each in found:
            if each.is_whole and each.name <= self.done_to:
                continue
            if each.name not in self._parts:
                self._parts[each.name] = _Part(each.first, is_whole=each.is_whole)
                self._free.add(each.name)
            part = self._parts[each.name]
            if not part.is_found:
                part.is_found = True
                if part.holder is None and not part.is_over:
                    self._free.add(each.name)
            if part.is_whole:
                continue
            if part.end is None:  # the first that finds it in this run says where it ends
                part.end = each.end
            is_over = part.end is not None and part.position >= part.end
            if is_over != part.is_over:
                self._move(each.name, None, is_over=is_over)

    def _plan(self, planned: Sequence[PlannedBatch], holder: WorkerKey) -> None:
        if not planned:
            return
        for batch in planned:
            for name, end in batch.ends.items():
                part = self._parts.get(name)
                if part is None or part.holder != holder:
                    raise FailedPrecondition(f"data.stream: {name} is not leased to this worker")
                if end < part.position:
                    raise not_allowed(f"planned position of {name}", end, f">= {part.position}")
        before = [batch for batch in self._planned.get(holder, []) if batch.step < planned[0].step]
        if len(before) + len(planned) > MOST_PLANNED:
            raise not_allowed("planned", len(before) + len(planned), f"at most {MOST_PLANNED} batches")
        self._planned[holder] = [*before, *planned]

    def _lease(self, most: int, holder: WorkerKey, members: Sequence[WorkerKey]) -> StreamAnswer:
        open_parts = len(self._free) + sum(len(own) for own in self._own.values())
        ending = {name for batch in self._planned.get(holder, []) for name in batch.ended}
        own = sorted(self._among(holder) - ending)
        count = max(1, len(members))
        share = open_parts // count + (holder in members[: open_parts % count])
        target = min(most, share)
        excess = 0 if most < share or self._free else max(0, len(own) - target)
        for name in heapq.nsmallest(target - len(own), self._free):
            self._move(name, holder)
            own.append(name)
        found = ((name, self._parts[name]) for name in own)
        parts = {name: LeasedPart(part.position, part.end, part.careful_until, part.deaths) for name, part in found}
        is_begun = bool(self._parts or self.done_to)
        give_back = tuple(own[len(own) - excess :])
        counts = self.counts.plus(self.before, -1)
        return StreamAnswer(parts, give_back, not open_parts, self.done_to, counts, is_begun)

    def at_cut(self, committed: Mapping[WorkerKey, int]) -> dict[str, Any]:
        """Returns the positions in rows that are cut at the workers' last steps, for a checkpoint.

        Args:
            committed: the last step in the cut of each worker; -1 when there is none.
        """
        then = JobStream.of_document(self.to_document())
        for holder in set(self._planned):
            then.left(holder, committed.get(holder, -1), is_orderly=True)
        saved = then.to_document()
        return {name: saved[name] for name in ("source", "counts", "before", "done_to", "watermark", "parts")}

    def to_document(self) -> dict[str, Any]:
        """Returns the saved form: plain values for JSON."""
        return {
            "run": self.run,
            "generation": self.generation,
            "source": self.source,
            "counts": asdict(self.counts),
            "before": asdict(self.before),
            "done_to": self.done_to,
            "watermark": self.watermark,
            "parts": {name: dict(vars(part)) for name, part in self._parts.items()},
            "planned": [
                [
                    *holder,
                    [
                        [batch.step, dict(batch.ends), list(batch.ended), asdict(batch.counts), dict(batch.times)]
                        for batch in batches
                    ],
                ]
                for holder, batches in self._planned.items()
            ],
        }

    @staticmethod
    def of_document(saved: Mapping[str, Any]) -> JobStream:
        """Returns the stream of a saved form; what a checkpoint has lacks the run and the workers."""
        parts = {name: _Part(**part) for name, part in saved["parts"].items()}
        for part in parts.values():  # JSON has no tuples
            part.holder = None if part.holder is None else (part.holder[0], part.holder[1])
        planned = {
            (worker, epoch): [
                PlannedBatch(step, ends, tuple(ended), EventCounts(**counts), times)
                for step, ends, ended, counts, times in each
            ]
            for worker, epoch, each in saved.get("planned", [])
        }
        return JobStream(
            saved.get("run", ""),
            saved.get("generation", 0),
            saved["source"],
            EventCounts(**saved["counts"]),
            EventCounts(**saved["before"]),
            saved["done_to"],
            saved["watermark"],
            parts,
            planned,
        )

    def restored(self, generation: int) -> JobStream:
        """Returns a stream that a checkpoint had, for the clock that begins with it: no worker has a lease."""
        parts = {
            name: replace(
                part, holder=None, end=None, is_found=False, is_idle=False, is_over=part.is_over and part.is_whole
            )
            for name, part in self._parts.items()
        }
        return replace(self, generation=generation, _parts=parts, _planned={})


def is_of_stream(saved: Mapping[str, Any]) -> bool:
    """Returns whether a saved form is of a stream, and not of files that are read in epochs."""
    return "parts" in saved
