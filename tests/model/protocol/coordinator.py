"""The coordinator: membership, epochs, the route, the cut. One operation at a time, each in two phases.

    FREEZE   every shard stops taking new commits, fences whom it is told, and reports its windows
    RESOLVE  the decision, made from all reports: members, finals of those who left, cut target, restore

A shard obeys only the newest generation. An operation that a fault overtakes is given up; a later RESOLVE always
carries the whole state, so a half-delivered decision is finished by the next one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from . import frames as f
from .worker import Witness

RECOVERIES = ("restore", "rollback")


@dataclass
class Operation:
    kind: str  # join, leave, dead, cut, restore, rollback
    worker: int = -1
    detail: int = 0  # nonce of a join, epoch of a leave or a death
    reports: dict[str, f.Report] = field(default_factory=dict)
    resolves: dict[str, f.Resolve] = field(default_factory=dict)
    done: dict[str, f.Resolved] = field(default_factory=dict)
    target: dict[f.Pair, int] | None = None
    step: int = -1  # of a cut

    @property
    def key(self) -> tuple[str, int, int]:
        return (self.kind, self.worker, self.detail)


@dataclass(frozen=True)
class Cut:
    """The last committed cut."""

    generation: int
    step: int  # of staleness 0: every step up to here is inside
    windows: dict[str, dict[f.Pair, f.WindowState]]
    members: dict[f.Pair, f.Span]


class Coordinator:
    name = "c"

    def __init__(
        self,
        shards: list[str],
        workers: int,
        staleness: int | None,
        witness: Witness,
        bugs: frozenset[str],
        *,
        has_quorum: bool = False,
    ) -> None:
        self.has_quorum = has_quorum
        self.shards, self.staleness, self.witness, self.bugs = shards, staleness, witness, bugs
        self.generation, self.route, self.lineage = 0, 1, 1
        self.epochs = dict.fromkeys(range(workers), 1)
        self.newest_epoch = 1  # of all workers, those that are forgotten too: it never goes back
        self.members = {(worker, 1): f.Span(0, None) for worker in range(workers)}
        self.first_step = dict.fromkeys(range(workers), 0)
        self.claims: dict[int, int | None] = dict.fromkeys(range(workers))
        self.last_nonce: dict[int, int] = {}
        self.finals: dict[f.Pair, f.WindowState] = {}
        self.left: set[f.Pair] = set()
        self.lost: dict[tuple[str, f.Pair], int] = {}
        self.incarnations = dict.fromkeys(shards, 0)
        self.cut = Cut(0, -1, {shard: {} for shard in shards}, dict(self.members))
        self.completed: Counter[str] = Counter()  # operations by kind
        self.operation: Operation | None = None
        # The first operation lets the empty shards in.
        self.queue = [Operation("restore" if staleness != 0 else "rollback")]

    def receive(self, frame: Any) -> list[Any]:
        return HANDLERS[type(frame)](self, frame)

    def tick(self) -> list[Any]:
        operation = self.operation
        if operation is None:
            return self._start()
        if not operation.resolves:
            return [self._hold(operation, shard) for shard in self.shards if shard not in operation.reports]
        return [resolve for shard, resolve in operation.resolves.items() if shard not in operation.done]

    @property
    def idle(self) -> bool:
        return self.operation is None and not self.queue

    @property
    def settled(self) -> bool:
        """Workers may come in. A cut changes nothing for them, and may itself wait for the one that comes."""
        return self.idle or (self.operation is not None and self.operation.kind == "cut")

    def live(self, worker: int) -> f.Pair | None:
        pair = (worker, self.epochs.get(worker, 0))
        span = self.members.get(pair)
        return pair if span is not None and span.until is None else None

    def expected(self, worker: int) -> bool:
        """A rollback took this worker back into the job and its process has not come yet."""
        return self.live(worker) is not None and self.claims.get(worker) is None

    def forget(self, worker: int) -> None:
        """Knows nothing more of a worker that is no member, as of the ranks of a job that ended long ago."""
        if self.idle and self.live(worker) is None:
            self.epochs.pop(worker, None)
            self.first_step.pop(worker, None)
            self.claims.pop(worker, None)

    def _new_epoch(self, worker: int) -> int:
        if "epochs_begin_anew" in self.bugs:
            return self.epochs.get(worker, 0) + 1
        self.newest_epoch += 1
        return self.newest_epoch

    # Operations

    def request(self, kind: str, worker: int = -1, detail: int = 0) -> list[Any]:
        # With a quorum a job goes on without a worker that died, as the others make the steps without it.
        goes_back = ("restore",) if self.has_quorum else ("dead", "restore")
        if self.staleness == 0 and kind in goes_back:
            kind, worker, detail = "rollback", -1, 0
        operation = Operation(kind, worker, detail)
        current = self.operation
        if any(operation.key == queued.key for queued in self.queue):
            return []
        if current is not None and current.key == operation.key and kind not in RECOVERIES:
            return []
        if kind in RECOVERIES:
            self.queue.insert(0, operation)
        else:
            self.queue.append(operation)
        overtakes = kind in RECOVERIES or (current is not None and current.kind == "cut" and kind != "cut")
        if current is not None and overtakes:
            self.operation = None
            if not current.resolves and current.kind not in ("cut", *RECOVERIES):
                self.queue.insert(1, Operation(*current.key))
        return self._start()

    def lease_expired(self, worker: int) -> list[Any]:
        pair = self.live(worker)
        return self.request("dead", *pair) if pair else []

    def _start(self) -> list[Any]:
        while self.operation is None and self.queue:
            operation = self.queue.pop(0)
            if operation.kind in ("dead", "leave") and self.live(operation.worker) != (
                operation.worker,
                operation.detail,
            ):
                continue
            self.generation += 1
            self.operation = operation
            return [self._hold(operation, shard) for shard in self.shards]
        return []

    def _hold(self, operation: Operation, shard: str) -> f.Hold:
        fence: tuple[f.Pair, ...] = ()
        if operation.kind == "dead":
            fence = ((operation.worker, operation.detail),)
        elif operation.kind == "rollback" and "rollback_keeps_epochs" not in self.bugs:
            fence = tuple(self.members)
        return f.Hold(self.name, shard, self.generation, fence)

    def on_report(self, frame: f.Report) -> list[Any]:
        operation = self.operation
        if operation is None or frame.generation != self.generation or operation.resolves:
            return []
        if frame.empty and operation.kind not in RECOVERIES:
            return self.request("restore")
        operation.reports[frame.src] = frame
        if len(operation.reports) < len(self.shards):
            return []
        self._decide(operation)
        return list(operation.resolves.values())

    # Decisions: made once, from the reports of all shards

    def _decide(self, operation: Operation) -> None:
        reports = operation.reports
        for shard, report in reports.items():
            self.incarnations[shard] = max(self.incarnations[shard], report.incarnation)
        restored = {shard for shard, report in reports.items() if report.empty}
        top = max((state.step for report in reports.values() for state in report.windows.values()), default=-1)
        if operation.kind == "join":
            self._join(operation.worker, operation.detail, top + 1)
        elif operation.kind == "leave":
            self._leave((operation.worker, operation.detail), reports, top)
        elif operation.kind == "dead":
            self._dead((operation.worker, operation.detail), reports, top)
        elif operation.kind == "cut":
            operation.target, operation.step = self._cut_target(reports, top), top
        elif operation.kind == "rollback":
            restored = set(self.shards)
            self._roll_back()
        if restored:
            self.lineage += 1
            if "restore_keeps_route" not in self.bugs:
                self.route += 1
        self._count_lost(reports, restored)
        for shard in self.shards:
            operation.resolves[shard] = f.Resolve(
                self.name,
                shard,
                self.generation,
                reports[shard].incarnation,
                self.route,
                dict(self.members),
                dict(self.epochs),
                dict(self.finals),
                operation.target,
                self.cut.generation if shard in restored else None,
                self.lineage,
            )

    def _join(self, worker: int, nonce: int, first: int) -> None:
        if self.live(worker) is not None:
            return
        self.epochs[worker] = self._new_epoch(worker)
        self.members[(worker, self.epochs[worker])] = f.Span(first, None)
        self.first_step[worker] = first
        self.claims[worker] = nonce

    def _final(self, pair: f.Pair, reports: dict[str, f.Report]) -> f.WindowState:
        states = [report.windows.get(pair, f.WindowState()) for report in reports.values()]
        return max(states, key=lambda state: state.committed)

    def _depart(self, pair: f.Pair, final: f.WindowState, top: int) -> None:
        # Staleness 0: nobody reduced a step without this worker. Else others are ahead and counted it until now.
        until = final.step if self.staleness == 0 else max(final.step, top)
        self.members[pair] = self.members[pair]._replace(until=until)
        self.finals[pair] = final
        self.witness.closed(pair, final)

    def _leave(self, pair: f.Pair, reports: dict[str, f.Report], top: int) -> None:
        final = self._final(pair, reports)
        behind = any(r.windows.get(pair, f.WindowState()).committed < final.committed for r in reports.values())
        if behind:
            return  # a restored shard lacks commits that the worker still holds: it replays first
        self.left.add(pair)
        self._depart(pair, final, top)

    def _dead(self, pair: f.Pair, reports: dict[str, f.Report], top: int) -> None:
        self._depart(pair, self._final(pair, reports), top)

    def _cut_target(self, reports: dict[str, f.Report], top: int) -> dict[f.Pair, int]:
        live = [pair for pair, span in self.members.items() if span.until is None]
        if self.staleness == 0:
            return {pair: top for pair in live if self.members[pair].first <= top}
        return {pair: self._final(pair, reports).step for pair in live}

    def _roll_back(self) -> None:
        closed = set(self.members)
        self.members = {pair: span for pair, span in self.cut.members.items() if span.until is not None}
        for pair, span in self.cut.members.items():
            if span.until is None:
                worker = pair[0]
                if "rollback_keeps_epochs" not in self.bugs:
                    self.epochs[worker] = self._new_epoch(worker)
                    self.claims[worker] = None
                # The new epoch has no commit before the cut: it counts from the step after.
                first = self.first_step[worker] = max(self.cut.step + 1, span.first)
                self.members[(worker, self.epochs[worker])] = f.Span(first, None)
        self.finals = {pair: final for pair, final in self.finals.items() if pair in self.members}
        self.witness.rolled_back(self.cut.step, closed)

    def _count_lost(self, reports: dict[str, f.Report], restored: set[str]) -> None:
        """Commits of workers that left and that a shard will never have: counted per shard."""
        for pair, final in self.finals.items():
            for shard, report in reports.items():
                windows = self.cut.windows[shard] if shard in restored else report.windows
                count = windows.get(pair, f.WindowState()).count
                # Resolve finishes what is in doubt here.
                finishes = shard not in restored and report.prepared.get(pair) == final.committed
                above = windows.get(pair, f.WindowState()).floor < final.committed
                self.lost[(shard, pair)] = final.count - count - (1 if finishes and above else 0)

    def on_resolved(self, frame: f.Resolved) -> list[Any]:
        operation = self.operation
        if operation is None or frame.generation != self.generation or not operation.resolves:
            return []
        operation.done[frame.src] = frame
        if len(operation.done) < len(self.shards):
            return []
        self.operation = None
        self.completed[operation.kind] += 1
        frames = self._commit_cut(operation) if operation.kind == "cut" else []
        return [*frames, *self._start()]

    def _commit_cut(self, operation: Operation) -> list[Any]:
        windows = {shard: done.windows for shard, done in operation.done.items()}
        self.cut = Cut(self.generation, operation.step, windows, dict(self.members))
        live = [pair for pair, span in self.members.items() if span.until is None]
        return [
            f.Durable(self.name, f"w{worker}", epoch, min(of.get((worker, epoch), f.WindowState()).committed
                                                          for of in windows.values()))
            for worker, epoch in live
        ]  # fmt: skip

    # Calls of workers and shards

    def on_shard_up(self, frame: f.ShardUp) -> list[Any]:
        if frame.incarnation <= self.incarnations[frame.src]:
            return []
        self.incarnations[frame.src] = frame.incarnation
        return self.request("restore")

    def on_register(self, frame: f.Register) -> list[Any]:
        worker = int(frame.src[1:])
        last, pair, claim = self.last_nonce.get(worker, 0), self.live(worker), self.claims.get(worker)
        if frame.nonce < last:
            return []
        fresh, self.last_nonce[worker] = frame.nonce > last, frame.nonce
        if pair is not None and claim is None:
            self.claims[worker] = claim = frame.nonce
        if pair is not None and claim == frame.nonce:
            if pair[1] <= frame.epoch or not self.settled:
                return []
            step = self.first_step[worker]
            return [f.Welcome(self.name, frame.src, frame.nonce, pair[1], step, self.route)]
        if pair is not None:  # another process of that id: the old one is dead
            if frame.epoch not in (0, pair[1]):
                return []
            return [*self.request("dead", *pair), *self.request("join", worker, frame.nonce)]
        if fresh or frame.epoch == self.epochs.get(worker, 0):
            return self.request("join", worker, frame.nonce)
        if any(operation.key == ("join", worker, frame.nonce) for operation in self._pending()):
            return []
        return [f.Refused(self.name, frame.src, frame.nonce)]

    def _pending(self) -> list[Operation]:
        return [*self.queue, *([self.operation] if self.operation else [])]

    def on_leave(self, frame: f.Leave) -> list[Any]:
        worker = int(frame.src[1:])
        pair = (worker, frame.epoch)
        if self.live(worker) == pair:
            if frame.route != self.route:
                return [f.LeaveReply(self.name, frame.src, frame.epoch, f.STALE_ROUTE)] if self.settled else []
            return self.request("leave", *pair)
        if not self.settled:
            return []
        code = "" if pair in self.left and pair in self.members else f.FENCED
        return [f.LeaveReply(self.name, frame.src, frame.epoch, code)]

    def on_get_route(self, frame: f.GetRoute) -> list[Any]:
        return [f.RouteIs(self.name, frame.src, self.route)] if self.settled else []


HANDLERS: dict[type, Any] = {
    f.Report: Coordinator.on_report,
    f.Resolved: Coordinator.on_resolved,
    f.ShardUp: Coordinator.on_shard_up,
    f.Register: Coordinator.on_register,
    f.Leave: Coordinator.on_leave,
    f.GetRoute: Coordinator.on_get_route,
}
