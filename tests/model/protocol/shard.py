"""A shard: rows, the commit log with its window, the clock, the cut, and the ring for followers.

A pure state machine: ``receive`` and ``tick`` return the frames to send. ``bugs`` names planted faults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import frames as f

KEYS = (0, 1)
RING_ROWS = 4


class Applied(NamedTuple):
    """Ghost: one change of rows. ``ids`` in the order of reduction, ``scale`` = the N of 1/N."""

    step: int
    scale: int
    ids: tuple[f.CommitId, ...]
    parts: tuple[f.Part, ...]


@dataclass
class Image:
    """A shard's part of a cut: rows and window of one instant."""

    rows: dict[int, f.Row] = field(default_factory=dict)
    sequence: int = 0
    windows: dict[Any, f.WindowState] = field(default_factory=dict)
    done_step: int = -1
    applied: list[Applied] = field(default_factory=list)


class Shard:
    def __init__(self, index: int, staleness: int | None, bugs: frozenset[str], *, quorum: int | None = None) -> None:
        self.name = f"s{index}"
        self.staleness = staleness
        self.quorum = quorum  # with staleness 0: a step has so many members; None: all workers
        self.bugs = bugs
        self.disk: dict[int, Image] = {0: Image()}
        self.incarnation = 0
        self.refuse_next = False
        self.start()

    # Life

    def start(self) -> None:
        """A fresh process: it knows nothing and serves nothing until the coordinator lets it in."""
        self.incarnation += 1
        self.up, self.serving = True, False
        self.generation = self.resolved = -1
        self.route = self.lineage = 0
        self.held = False
        self.target: dict[f.Pair, int] | None = None
        self.members: dict[f.Pair, f.Span] = {}
        self.epochs: dict[int, int] = {}
        self.fenced: set[f.Pair] = set()
        self.prepared: dict[f.Pair, f.Prepare] = {}
        self.kept: dict[int, dict[f.Pair, tuple[f.CommitId, f.Part]]] = {}
        self.parked: dict[str, f.Pull] = {}
        self._load(Image())

    def crash(self) -> None:
        self.up = False

    def _load(self, image: Image) -> None:
        self.rows = dict(image.rows)
        self.sequence = image.sequence
        self.windows = dict(image.windows)
        self.done_step = image.done_step
        self.applied = list(image.applied)
        self.ring: list[tuple[int, int]] = []
        self.ring_floor = image.sequence
        self.loads = getattr(self, "loads", 0) + 1

    def receive(self, frame: Any) -> list[Any]:
        if not self.up:
            return []
        return HANDLERS[type(frame)](self, frame)

    def tick(self) -> list[Any]:
        return [f.ShardUp(self.name, "c", self.incarnation)] if self.up and not self.serving else []

    # Data frames

    def _refusal(self, frame: Any) -> str | None:
        if not self.serving or frame.route > self.route:
            return f.UNAVAILABLE  # the coordinator has not told this shard yet
        if frame.route < self.route:
            return f.STALE_ROUTE
        if "no_fencing" in self.bugs and isinstance(frame, f.Prepare | f.Commit):
            return None
        known = self.epochs.get(frame.worker, 0)
        if frame.epoch > known:
            return f.UNAVAILABLE
        pair = (frame.worker, frame.epoch)
        span = self.members.get(pair)
        if frame.epoch < known or pair in self.fenced or span is None or span.until is not None:
            return f.FENCED
        return None

    def _error(self, frame: Any, code: str, waits_for: tuple[int, ...] = ()) -> list[Any]:
        return [f.Error(self.name, frame.src, frame.req, code, waits_for)]

    def _window_key(self, worker: int, epoch: int) -> Any:
        return worker if "window_forgets_epoch" in self.bugs else (worker, epoch)

    def window(self, worker: int, epoch: int) -> f.WindowState:
        return self.windows.get(self._window_key(worker, epoch), f.WindowState())

    def on_hello(self, frame: f.Hello) -> list[Any]:
        if code := self._refusal(frame):
            return self._error(frame, code)
        return [f.HelloAck(self.name, frame.src, frame.req, self.window(frame.worker, frame.epoch))]

    def on_pull(self, frame: f.Pull) -> list[Any]:
        if code := self._refusal(frame):
            return self._error(frame, code)
        if self.readable(frame.step):
            return [self._rows(frame)]
        self.parked[frame.src] = frame
        return []

    def expire(self) -> list[Any]:
        """The deadline of every parked pull passes."""
        parked, self.parked = self.parked, {}
        return [e for pull in parked.values() for e in self._error(pull, f.DEADLINE, self.waits_for(pull.step))]

    def _bound(self, step: int) -> int:
        """The last step whose commits a pull of ``step`` must see."""
        slack = 1 if "bound_off_by_one" in self.bugs else 0
        return step - 1 - (self.staleness or 0) - slack

    def readable(self, step: int) -> bool:
        if self.staleness is None:
            return True
        return self.done_step >= self._bound(step) if self.staleness == 0 else not self.waits_for(step)

    def waits_for(self, step: int) -> tuple[int, ...]:
        if self.staleness == 0:
            there = self.kept.get(self.done_step + 1, {})
            return tuple(pair[0] for pair in self._counted(self.done_step + 1) if pair not in there)
        bound = self._bound(step)
        return tuple(
            pair[0]
            for pair, span in self.members.items()
            if span.until is None and span.first <= bound and self.window(*pair).step < bound
        )

    def _rows(self, frame: f.Pull) -> f.Rows:
        truth = {key: row if (row := self.rows.get(key, f.ABSENT))[1] is not None else f.ABSENT for key in KEYS}
        if "conditional_newer" in self.bugs:
            rows = {key: row for key, row in truth.items() if row[0] > frame.have.get(key, (-1, 0))}
        else:
            rows = {key: row for key, row in truth.items() if row[0] != frame.have.get(key)}
        return f.Rows(self.name, frame.src, frame.req, rows, truth, tuple(self.applied), dict(self.members))

    def on_prepare(self, frame: f.Prepare) -> list[Any]:
        if code := self._refusal(frame):
            return self._error(frame, code)
        pair = (frame.worker, frame.epoch)
        if frame.seq <= self.window(*pair).floor:
            return [f.Ack(self.name, frame.src, frame.req)]
        if self._is_full(frame.step):
            return [self._outside(frame)]
        if self.refuse_next:
            self.refuse_next = False
            return self._error(frame, f.EXHAUSTED)
        self.prepared[pair] = frame
        return [f.Ack(self.name, frame.src, frame.req)]

    def _settled(self, frame: f.Commit) -> list[Any]:
        """What a worker whose epoch is over is told of a COMMIT: that it was taken, or that it is being decided."""
        pair = (frame.worker, frame.epoch)
        if self._refusal(frame) != f.FENCED or "fenced_before_seen" in self.bugs:
            return []
        if frame.seq <= self.window(*pair).floor:
            return [f.Ack(self.name, frame.src, frame.req)]
        prepared = self.prepared.get(pair)
        if prepared is not None and prepared.seq == frame.seq and "fenced_while_deciding" not in self.bugs:
            return self._error(frame, f.UNAVAILABLE)  # the next RESOLVE takes it or forgets it
        return []

    def on_commit(self, frame: f.Commit) -> list[Any]:
        if answer := self._settled(frame):
            return answer
        if code := self._refusal(frame):
            return self._error(frame, code)
        pair = (frame.worker, frame.epoch)
        ack = f.Ack(self.name, frame.src, frame.req)
        if frame.seq <= self.window(*pair).floor and "dedup_off" not in self.bugs:
            return [ack]
        if self._is_full(frame.step):
            return [self._outside(frame)]
        if self.held and frame.step > (self.target or {}).get(pair, -1):
            return self._error(frame, f.UNAVAILABLE)
        part = frame.part
        if part is None:
            prepared = self.prepared.get(pair)
            if prepared is None or prepared.seq != frame.seq:
                return self._error(frame, f.NOT_PREPARED)
            part = prepared.part
        self._accept(pair, frame.seq, frame.step, part)
        return [ack, *self._finish_cut(), *self._unpark()]

    def on_abort(self, frame: f.Abort) -> list[Any]:
        if code := self._refusal(frame):
            return self._error(frame, code)
        pair = (frame.worker, frame.epoch)
        state = self.window(*pair)
        if frame.seq > state.floor and "abort_forgotten" not in self.bugs:
            self.windows[self._window_key(*pair)] = state._replace(floor=frame.seq)
        if (prepared := self.prepared.get(pair)) and prepared.seq <= frame.seq:
            del self.prepared[pair]
        return [f.Ack(self.name, frame.src, frame.req)]

    # Applying

    def _counted(self, step: int) -> list[f.Pair]:
        """Workers of a step, in rank order."""
        return [
            pair
            for pair, span in sorted(self.members.items())
            if span.first <= step and (span.until is None or step <= span.until)
        ]

    def _needed(self, step: int) -> int:
        """How many members a step has: all workers that count, or the quorum where more count."""
        counted = len(self._counted(step))
        if "quorum_of_the_living" in self.bugs:
            counted = sum(span.until is None for span in self.members.values())
        return counted if self.quorum is None else min(self.quorum, counted)

    def _is_full(self, step: int) -> bool:
        """Whether a step has its quorum, so that nobody else becomes a member. Once it is full it stays full."""
        if self.quorum is None:
            return False
        return step <= self.done_step or len(self.kept.get(step, {})) >= max(1, self._needed(step))

    def _outside(self, frame: Any) -> f.Error:
        step = self.done_step + 1
        while self._is_full(step):
            step += 1
        return f.Error(self.name, frame.src, frame.req, f.OUTSIDE, open_step=step)

    def _accept(self, pair: f.Pair, seq: int, step: int, part: f.Part) -> None:
        state = self.window(*pair)
        self.windows[self._window_key(*pair)] = f.WindowState(max(seq, state.floor), seq, step, state.count + 1)
        self.prepared.pop(pair, None)
        commit = ((*pair, seq), part)
        if self.staleness == 0:
            self.kept.setdefault(step, {})[pair] = commit
            self._reduce()
        else:
            self._apply(step, len(self._counted(step)), [commit])

    def _reduce(self) -> None:
        while True:
            step = self.done_step + 1
            wanted, there = self._counted(step), self.kept.get(step, {})
            if self.quorum is not None:
                if not there or len(there) < self._needed(step):
                    return
                wanted = sorted(there)
            elif not wanted or any(pair not in there for pair in wanted):
                return
            order = [pair for pair in there if pair in wanted] if "arrival_order" in self.bugs else wanted
            self._apply(step, len(wanted), [there[pair] for pair in order])
            del self.kept[step]
            self.done_step = step

    def _apply(self, step: int, scale: int, commits: list[tuple[f.CommitId, f.Part]]) -> None:
        self.applied.append(Applied(step, scale, tuple(c[0] for c in commits), tuple(c[1] for c in commits)))
        for key in KEYS:
            updates = tuple((*commit, part.tag, scale) for commit, part in commits if key in part.keys)
            deleted = any(key in part.deleted for _, part in commits)
            if not updates and not deleted:
                continue
            self.sequence += 1
            value = None if deleted else (self.rows.get(key, f.ABSENT)[1] or ()) + updates
            self.rows[key] = ((self.lineage, self.sequence), value)
            self.ring.append((self.sequence, key))
        while len(self.ring) > RING_ROWS:
            self.ring_floor = self.ring.pop(0)[0]

    def _unpark(self) -> list[Any]:
        ready = [pull for pull in self.parked.values() if self._refusal(pull) or self.readable(pull.step)]
        for pull in ready:
            del self.parked[pull.src]
        return [answer for pull in ready for answer in self.on_pull(pull)]

    # Control

    def on_hold(self, frame: f.Hold) -> list[Any]:
        stale = frame.generation < self.generation or frame.generation <= self.resolved
        if stale and "no_generation" not in self.bugs:
            return []
        self.generation = frame.generation
        self.held, self.target = "no_hold" not in self.bugs, None
        self.fenced.update(frame.fence)
        prepared = {pair: p.seq for pair, p in self.prepared.items()}
        report = f.Report(
            self.name, "c", frame.generation, self.incarnation, not self.serving, self._windows(), prepared
        )
        return [report, *self._unpark()]

    def _windows(self) -> dict[f.Pair, f.WindowState]:
        if "window_forgets_epoch" in self.bugs:
            return {(worker, self.epochs.get(worker, 1)): state for worker, state in self.windows.items()}
        return dict(self.windows)

    def on_resolve(self, frame: f.Resolve) -> list[Any]:
        if frame.incarnation != self.incarnation and "no_incarnation" not in self.bugs:
            return []  # decided from the report of an earlier process
        if frame.generation == self.resolved:
            return self._resolved()
        if frame.generation < self.generation and "no_generation" not in self.bugs:
            return []
        if not self.serving and frame.restore is None:
            return []
        self.generation = self.resolved = frame.generation
        self.serving = True
        self.route, self.members, self.epochs = frame.route, dict(frame.members), dict(frame.epochs)
        # What this shard fenced for a decision that was abandoned stays fenced.
        self.fenced &= set(frame.members)
        self.held, self.target = frame.target is not None, frame.target
        if frame.restore is not None:
            self._restore(frame)
        self._finish_left(frame.finals)
        if self.staleness == 0:
            self._reduce()
        return [*self._finish_cut(), *self._resolved(), *self._unpark()]

    def _restore(self, frame: f.Resolve) -> None:
        self.prepared, self.kept = {}, {}
        assert frame.restore is not None
        self._load(self.disk[frame.restore])
        if "lineage_not_raised" not in self.bugs:
            self.lineage = frame.lineage
        elif self.lineage == 0:
            self.lineage = 1

    def _finish_left(self, finals: dict[f.Pair, f.WindowState]) -> None:
        """Ends what workers that left had in doubt: committed anywhere is committed here, else forgotten."""
        for pair, final in finals.items():
            prepared = self.prepared.pop(pair, None)
            if prepared is None or "in_doubt_dropped" in self.bugs:
                continue
            if prepared.seq == final.committed and prepared.seq > self.window(*pair).floor:
                self._accept(pair, prepared.seq, prepared.step, prepared.part)

    def _finish_cut(self) -> list[Any]:
        if self.target is None:
            return []
        if self.quorum is None and any(self.window(*pair).step < step for pair, step in self.target.items()):
            return []
        if self.staleness == 0 and self.done_step < max(self.target.values(), default=-1):
            return []
        windows = self.windows if "cut_window_split" in self.bugs else dict(self.windows)
        image = Image(dict(self.rows), self.sequence, windows, self.done_step, list(self.applied))
        self.disk[self.generation] = image
        self.held, self.target = False, None
        return self._resolved()

    def _resolved(self) -> list[Any]:
        if self.target is not None:
            return []
        windows = self._windows()
        if self.resolved in self.disk and "cut_answered_late" not in self.bugs:
            windows = dict(self.disk[self.resolved].windows)  # of the cut, however often and late it is asked
        return [f.Resolved(self.name, "c", self.resolved, windows)]

    # Followers

    def on_sync(self, frame: f.Sync) -> list[Any]:
        if not self.serving:
            return []
        lineage, seen = frame.cursor
        end = (self.lineage, self.sequence)
        if lineage != self.lineage or seen < self.ring_floor:
            return [f.Snapshot(self.name, frame.src, end, dict(self.rows))]
        rows = {key: self.rows[key] for sequence, key in self.ring if sequence > seen}
        if "dirty_before_ack" in self.bugs:
            self.ring = []
        else:  # the cursor is the acknowledgement
            self.ring = [entry for entry in self.ring if entry[0] > seen]
            self.ring_floor = max(self.ring_floor, seen)
        return [f.Delta(self.name, frame.src, frame.cursor, end, rows)]


HANDLERS: dict[type, Any] = {
    f.Hello: Shard.on_hello,
    f.Pull: Shard.on_pull,
    f.Prepare: Shard.on_prepare,
    f.Commit: Shard.on_commit,
    f.Abort: Shard.on_abort,
    f.Hold: Shard.on_hold,
    f.Resolve: Shard.on_resolve,
    f.Sync: Shard.on_sync,
}
