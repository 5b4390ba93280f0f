"""Random schedules of the protocol model: a seed names one, a failing one is shrunk by dropping events.

A schedule is a list of events, each of an action and a number that picks the frame or node it falls on, so that any
sublist of it is a schedule too. After the events, a fair end: nothing is lost any more, every frame arrives, who waits
asks again, who is down comes back; then the run must end within a number of rounds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from invariants import Checker, ViolationError, require
from protocol.coordinator import Coordinator
from protocol.follower import Follower
from protocol.shard import Shard
from protocol.worker import Worker

ROUNDS = 300  # of the fair end; a run without faults needs about 40

# Action -> weight. Faults are rare beside deliveries, so that runs get somewhere between them.
WEIGHTS = {
    "deliver": 100,  # a random frame: reordering and delay
    "deliver_oldest": 50,
    "deliver_newest": 0,  # leaves old frames behind: they come back very late
    "duplicate": 12,
    "drop": 8,
    "tick_worker": 14,
    "tick_coordinator": 8,
    "tick_shard": 3,
    "tick_follower": 10,
    "crash_worker": 1,
    "start_worker": 4,
    "crash_shard": 1,
    "start_shard": 4,
    "restart_follower": 1,
    "expire_lease": 1,
    "expire_pulls": 6,
    "cut": 4,
    "leave": 1,
    "refuse_prepare": 3,
    "forget_worker": 0,
}
CALM = {"crash_worker": 0, "crash_shard": 0, "expire_lease": 0, "leave": 0}
LATE = {"deliver": 30, "deliver_oldest": 10, "deliver_newest": 120}
PROFILES: dict[str, dict[str, int]] = {
    "mixed": {},
    "network": CALM,
    "workers": {**CALM, "crash_worker": 2, "expire_lease": 2, "leave": 2, "duplicate": 25},
    "shards": {**CALM, "crash_shard": 2, "cut": 10, "duplicate": 25},
    "leases": {**CALM, "crash_worker": 6, "expire_lease": 8, "start_worker": 12, "drop": 20},
    "late": {**LATE, "cut": 8},
    "late follower": {**CALM, **LATE, "crash_shard": 3, "start_shard": 30, "tick_shard": 15, "tick_coordinator": 15,
                      "cut": 10, "tick_follower": 60},
    "restores": {**CALM, "crash_shard": 6, "start_shard": 25, "cut": 16, "tick_follower": 40, "tick_coordinator": 25},
    "forgotten": {**LATE, "crash_worker": 4, "expire_lease": 8, "start_worker": 12, "leave": 3, "forget_worker": 20},
    "storm": {"crash_worker": 3, "crash_shard": 3, "expire_lease": 3, "cut": 10, "drop": 2},
    "quorum": {**CALM, "duplicate": 25, "cut": 6},
    "quorum of mortals": {**CALM, "crash_worker": 6, "expire_lease": 8, "start_worker": 12, "drop": 20, "leave": 2},
    "quorum storm": {"crash_worker": 3, "crash_shard": 2, "expire_lease": 3, "cut": 10, "leave": 2},
}  # fmt: skip
WITH_QUORUM = ("quorum", "quorum of mortals", "quorum storm")


class Event(NamedTuple):
    action: str
    pick: int


@dataclass(frozen=True)
class Schedule:
    seed: int
    staleness: int | None
    shards: int
    workers: int  # of the start; one more may join
    last_step: int
    events: tuple[Event, ...]
    quorum: int | None = None  # members of a step, with staleness 0; None: all workers

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}: staleness {self.staleness}, quorum {self.quorum}, {self.shards} shards, "
            f"{self.workers} workers"
        )
        return "\n".join([head, *(f"  {event.action} {event.pick}" for event in self.events)])


def random_schedule(seed: int, profile: str | None = None) -> Schedule:
    """The schedule of a seed; the seed chooses the profile too unless one is named."""
    rng = random.Random(seed)
    chosen = rng.choice(list(PROFILES))
    weights = {**WEIGHTS, **PROFILES[profile or chosen]}
    actions = rng.choices(list(weights), list(weights.values()), k=rng.randint(50, 350))
    schedule = Schedule(
        seed=seed,
        staleness=rng.choice((0, 0, 1, 2, None)),
        shards=rng.choice((1, 2, 2, 3)),
        workers=rng.choice((1, 2, 2, 3)),
        last_step=rng.randint(1, 4),
        events=tuple(Event(action, rng.getrandbits(16)) for action in actions),
    )
    if (profile or chosen) in WITH_QUORUM:
        workers = rng.choice((2, 3, 3))
        schedule = replace(schedule, staleness=0, workers=workers, quorum=rng.randint(1, workers))
    return schedule


class Cluster:
    """Every process of one run, and the frames between them."""

    def __init__(self, schedule: Schedule, bugs: frozenset[str] = frozenset()) -> None:
        quorum = schedule.quorum
        self.checker = Checker(schedule.staleness, quorum)
        self.shards = [Shard(index, schedule.staleness, bugs, quorum=quorum) for index in range(schedule.shards)]
        names, has_quorum = [shard.name for shard in self.shards], quorum is not None
        self.coordinator = Coordinator(
            names, schedule.workers, schedule.staleness, self.checker, bugs, has_quorum=has_quorum
        )
        self.workers = [
            Worker(worker, names, schedule.last_step, self.checker, bugs, has_quorum=has_quorum)
            for worker in range(schedule.workers + 1)
        ]
        self.follower = Follower(names, bugs)
        self.nodes: dict[str, Any] = {
            node.name: node for node in (*self.shards, *self.workers, self.coordinator, self.follower)
        }
        self.frames: list[Any] = []
        self.recoveries = self.ticks = 0
        self.send(self.coordinator.tick())
        for worker in self.workers[: schedule.workers]:
            self.send(worker.start())

    def send(self, frames: list[Any]) -> None:
        self.frames.extend(frames)

    def deliver(self, place: int, *, keep: bool = False) -> None:
        frame = self.frames[place] if keep else self.frames.pop(place)
        self.send(self.nodes[frame.dst].receive(frame))

    def check(self) -> None:
        for shard in self.shards:
            if shard.up:
                self.checker.check_shard(shard)
                self.checker.check_follower(shard, self.follower.rows[shard.name], self.follower.cursor[shard.name])

    # Events

    def act(self, event: Event) -> None:
        getattr(self, "_" + event.action)(event.pick)
        self.check()

    def _deliver(self, pick: int) -> None:
        if self.frames:
            self.deliver(pick % len(self.frames))

    def _deliver_oldest(self, _pick: int) -> None:
        if self.frames:
            self.deliver(0)

    def _deliver_newest(self, _pick: int) -> None:
        if self.frames:
            self.deliver(len(self.frames) - 1)

    def _duplicate(self, pick: int) -> None:
        if self.frames:
            self.deliver(pick % len(self.frames), keep=True)

    def _drop(self, pick: int) -> None:
        if self.frames:
            self.frames.pop(pick % len(self.frames))

    def _tick_worker(self, pick: int) -> None:
        worker = self.workers[pick % len(self.workers)]
        if worker.busy:
            self.send(worker.tick())

    def _tick_coordinator(self, _pick: int) -> None:
        self.send(self.coordinator.tick())

    def _tick_shard(self, pick: int) -> None:
        self.send(self.shards[pick % len(self.shards)].tick())

    def _tick_follower(self, _pick: int) -> None:
        self.send(self.follower.tick())

    def _crash_worker(self, pick: int) -> None:
        worker = self.workers[pick % len(self.workers)]
        if worker.busy:
            worker.crash()

    def _start_worker(self, pick: int) -> None:
        worker = self.workers[pick % len(self.workers)]
        if worker.phase == "down" or (worker.phase == "left" and self.coordinator.expected(worker.worker)):
            self.send(worker.start())

    def _crash_shard(self, pick: int) -> None:
        shard = self.shards[pick % len(self.shards)]
        if shard.up:
            self.recoveries += 1
            shard.crash()

    def _start_shard(self, pick: int) -> None:
        shard = self.shards[pick % len(self.shards)]
        if not shard.up:
            shard.start()

    def _restart_follower(self, _pick: int) -> None:
        self.follower.start()

    def _expire_lease(self, pick: int) -> None:
        self.send(self.coordinator.lease_expired(self.workers[pick % len(self.workers)].worker))

    def _expire_pulls(self, pick: int) -> None:
        shard = self.shards[pick % len(self.shards)]
        if shard.up:
            self.send(shard.expire())

    def _cut(self, _pick: int) -> None:
        if self.coordinator.idle:
            self.send(self.coordinator.request("cut"))

    def _leave(self, pick: int) -> None:
        self.workers[pick % len(self.workers)].wants_to_leave = True

    def _forget_worker(self, pick: int) -> None:
        worker = self.workers[pick % len(self.workers)]
        if not worker.busy:  # its process is gone, its frames may still come
            self.coordinator.forget(worker.worker)

    def _refuse_prepare(self, pick: int) -> None:
        self.shards[pick % len(self.shards)].refuse_next = True

    # The fair end

    def settle(self) -> None:
        for shard in self.shards:
            shard.refuse_next = False
        for _ in range(ROUNDS):
            self._drain()
            if self._ended():
                self.check()
                self.checker.check_end(self.shards, self.coordinator.lost, self.recoveries)
                return
            self._ask_again()
        phases = {worker.name: worker.phase for worker in self.workers}
        raise ViolationError(f"the run does not end: workers {phases}, operation {self.coordinator.operation}")

    def _drain(self) -> None:
        budget = 5_000
        while self.frames:
            budget -= 1
            require(budget > 0, "frames breed frames without end", self.frames[0])
            self.deliver(0)
            self.check()

    def _ask_again(self) -> None:
        for place, worker in enumerate(self.workers):
            if worker.phase == "down" and worker.nonce == 0:
                continue  # the spare one was never started
            self._start_worker(place)
            self._tick_worker(place)
            if worker.phase == "left":  # a late Register may have made it a member again, whose lease ends
                self._expire_lease(place)
        for place in range(len(self.shards)):
            self._start_shard(place)
            self._tick_shard(place)
        self._tick_coordinator(0)
        self._tick_follower(0)

    def _ended(self) -> bool:
        gone = all(worker.phase == "left" or (worker.phase == "down" and worker.nonce == 0) for worker in self.workers)
        expected = any(self.coordinator.expected(worker.worker) for worker in self.workers)
        cursors = self.follower.cursor
        followed = all(cursors[shard.name] == (shard.lineage, shard.sequence) for shard in self.shards)
        serving = all(shard.up and shard.serving for shard in self.shards)
        return gone and not expected and serving and followed and self.coordinator.idle


def run(schedule: Schedule, bugs: frozenset[str] = frozenset()) -> Cluster:
    """Plays a schedule to its end.

    Raises:
        ViolationError: an invariant broke, or the run does not end.
    """
    cluster = Cluster(schedule, bugs)
    for event in schedule.events:
        cluster.act(event)
    cluster.settle()
    return cluster


def fault(schedule: Schedule, bugs: frozenset[str] = frozenset()) -> str | None:
    """What is wrong with a run; a state machine that raises is as wrong as a broken invariant."""
    try:
        run(schedule, bugs)
    except Exception as error:  # a planted bug may break a state machine anywhere
        return f"{type(error).__name__}: {error}"
    return None


def shrink(schedule: Schedule, bugs: frozenset[str] = frozenset()) -> Schedule:
    """A sublist of the events that still fails, from which no single event can be dropped."""
    size = max(1, len(schedule.events) // 2)
    while True:
        begin, dropped = 0, False
        while begin < len(schedule.events):
            events = schedule.events[:begin] + schedule.events[begin + size :]
            smaller = replace(schedule, events=events)
            if fault(smaller, bugs):
                schedule, dropped = smaller, True
            else:
                begin += size
        if size == 1 and not dropped:
            return schedule
        size = max(1, size // 2)
