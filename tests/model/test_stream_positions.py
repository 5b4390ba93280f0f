"""Random walks of workers that read a stream by leases, with kills, lost answers, restarts and restores.

The state of the coordinator is the product's (ps_server/coordinator/state/stream_leases.py). Workers and shards are
small: a shard has the events that were applied and the last step of each worker. At the end every event was applied
once, and the counts say so.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from sparserow.ps_server.coordinator.state.stream_leases import JobStream
from sparserow.ps_server.coordinator.state.stream_requests import (
    EventCounts,
    PlannedBatch,
    StreamPart,
    StreamRequest,
    WorkerKey,
)

_PARTS, _EVENTS, _STEPS = 5, 40, 400


@dataclass
class Rules:
    """What workers and the coordinator do; each False is a planted fault.

    Attributes:
        announces_first: a batch is committed after it was announced, and not before.
        settles_first: a part is given back when all commits from it are applied.
        asks_the_shards: the operation that fences a worker takes its last step from the shards.
        saves_first: the state is saved before it is answered.
    """

    announces_first: bool = True
    settles_first: bool = True
    asks_the_shards: bool = True
    saves_first: bool = True


@dataclass
class Shards:
    """Which events were applied, and the last step of each worker."""

    applied: Counter[tuple[str, int]] = field(default_factory=Counter)
    last_step: dict[WorkerKey, int] = field(default_factory=dict)

    def copy(self) -> Shards:
        return Shards(Counter(self.applied), dict(self.last_step))


@dataclass
class Worker:
    """A worker with the batches that it has announced and not committed yet."""

    key: WorkerKey
    step: int
    positions: dict[str, int] = field(default_factory=dict)
    queue: list[tuple[PlannedBatch, list[tuple[str, int]]]] = field(default_factory=list)
    sent: list[tuple[PlannedBatch, list[tuple[str, int]]]] = field(default_factory=list)  # not applied yet
    give_back: tuple[str, ...] = ()


class Walk:
    """One random walk.

    Args:
        seed: of all choices.
        rules: what is done.
        is_whole: whether parts are files, which are read once, one at a time.
    """

    def __init__(self, seed: int, rules: Rules, *, is_whole: bool) -> None:
        self._random, self._rules, self._is_whole = random.Random(seed), rules, is_whole
        self.state = JobStream("run", 1, "source")
        self._saved = self.state.to_document()
        self.shards = Shards()
        self._checkpoint: tuple[dict[str, object], Shards] | None = None
        self.workers: list[Worker] = []
        self._next_worker = 0
        self.is_over = False

    # ---- the coordinator

    def _save(self) -> None:
        self._saved = self.state.to_document()

    def _answer(
        self, worker: Worker, planned: list[PlannedBatch], *, settled: int, given_back: tuple[str, ...]
    ) -> None:
        request = StreamRequest(
            run="run",
            source="source",
            settled=settled,
            planned=planned,
            found=[StreamPart(name, 0, None if self._is_whole else _EVENTS, self._is_whole) for name in self._names()],
            given_back=given_back,
            most=1 if self._is_whole else 4096,
        )
        members = [each.key for each in self.workers]
        for _ in range(2 if self._random.random() < 0.2 else 1):  # the first answer is lost
            answer = self.state.answer(request, worker.key, members, members)
            if self._rules.saves_first:
                self._save()
        self.is_over = answer.is_over
        for name in list(worker.positions):
            if name not in answer.parts:
                del worker.positions[name]
        for name, part in answer.parts.items():
            worker.positions.setdefault(name, part.position)
        worker.give_back = answer.give_back

    @staticmethod
    def _names() -> list[str]:
        return [f"part{number}" for number in range(_PARTS)]

    # ---- what happens

    def join(self) -> None:
        """A worker begins, at most the fourth."""
        if len(self.workers) < 4:
            self.workers.append(Worker((self._next_worker, 1), step=0))
            self._next_worker += 1

    def round(self, worker: Worker) -> None:
        """A worker with nothing to commit settles, reads, and announces what it will commit."""
        if worker.queue:
            return
        if self._rules.settles_first or not worker.give_back:
            self._arrive(worker, len(worker.sent))
        given_back = tuple(name for name in worker.give_back if name in worker.positions)
        for name in given_back:
            del worker.positions[name]
        planned = []
        for _ in range(self._random.randint(0, 3)):
            ends, events, ended = {}, [], []
            for name, position in list(worker.positions.items()):
                end = min(_EVENTS, position + self._random.randint(0, 4))
                events += [(name, at) for at in range(position, end)]
                if end > position or (end == _EVENTS and self._is_whole):
                    ends[name] = worker.positions[name] = end
                if end == _EVENTS and self._is_whole:
                    ended.append(name)
            for name in ended:
                del worker.positions[name]
            counts = EventCounts(events=len(events))
            planned.append(PlannedBatch(worker.step + len(worker.queue), ends, tuple(ended), counts))
            worker.queue.append((planned[-1], events))
        settled = worker.step - len(worker.sent) - 1
        if not self._rules.announces_first:
            while worker.queue:
                self.commit(worker)
            if self._random.random() < 0.1:
                self.kill(worker)
                return
        self._answer(worker, planned, settled=settled, given_back=given_back)

    def commit(self, worker: Worker) -> None:
        """A worker sends its next commit, which arrives at once or later, in order."""
        if not worker.queue:
            return
        batch, events = worker.queue.pop(0)
        assert batch.step == worker.step
        worker.step += 1
        worker.sent.append((batch, events))
        if self._random.random() < 0.7:
            self._arrive(worker, len(worker.sent))

    def _arrive(self, worker: Worker, count: int) -> None:
        for batch, events in worker.sent[:count]:
            self.shards.applied.update(events)
            self.shards.last_step[worker.key] = batch.step
        del worker.sent[:count]

    def kill(self, worker: Worker) -> None:
        """A worker dies; some of what it sent arrives still, and the shards refuse it afterwards."""
        self._arrive(worker, self._random.randint(0, len(worker.sent)))
        self.workers.remove(worker)
        known = self.shards.last_step.get(worker.key, -1)
        last_step = known if self._rules.asks_the_shards else -1
        self.state.left(worker.key, last_step)
        self._save()

    def restart_coordinator(self) -> None:
        """The coordinator begins again from what it saved."""
        self.state = JobStream.of_document(self._saved)

    def save(self) -> None:
        """A checkpoint cuts rows and positions at one instant."""
        self._checkpoint = self.state.at_cut(dict(self.shards.last_step)), self.shards.copy()
        if self._random.random() < 0.7:
            self._save()

    def restore(self) -> None:
        """All workers leave, and the cluster goes back to the checkpoint."""
        if self._checkpoint is None:
            return
        document, shards = self._checkpoint
        self.workers.clear()
        self.shards = shards.copy()
        self.shards.last_step.clear()
        self.state = JobStream.of_document(document).restored(2)
        self._save()

    def go(self) -> None:
        """Walks, and then lets one worker read what is left."""
        some: list[Callable[[Worker], None]] = [self.round, self.commit, self.commit, self.commit]
        for _ in range(_STEPS):
            if not self.workers or self._random.random() < 0.05:
                self.join()
            worker = self._random.choice(self.workers)
            chance = self._random.random()
            if chance < 0.03:
                self.kill(worker)
            elif chance < 0.05:
                self.restart_coordinator()
            elif chance < 0.07:
                self.save()
            elif chance < 0.08:
                self.restore()
            else:
                self._random.choice(some)(worker)
        for worker in self.workers[1:]:
            self.kill(worker)
        self.join()
        last = self.workers[0]
        for _ in range(2_000):
            while last.queue:
                self.commit(last)
            self.round(last)
            if self.is_over and not last.queue and not last.sent:
                return

    def wrong(self) -> str:
        """Returns what is wrong at the end; "" for nothing."""
        every = {(name, at) for name in self._names() for at in range(_EVENTS)}
        lost = every - set(self.shards.applied)
        twice = [event for event, count in self.shards.applied.items() if count > 1]
        if lost or twice:
            return f"{len(lost)} events lost, {len(twice)} applied twice"
        if self.state.counts.events != len(every):
            return f"{self.state.counts.events} events counted of {len(every)}"
        return ""


@pytest.mark.parametrize("is_whole", [False, True], ids=["partitions", "files"])
def test_each_event_is_applied_once(is_whole: bool) -> None:
    for seed in range(60):
        walk = Walk(seed, Rules(), is_whole=is_whole)
        walk.go()
        assert walk.wrong() == "", f"seed {seed}"
        if is_whole:
            assert walk.state.positions == {}  # files of the past take no room
            assert walk.state.done_to == "part4"


@pytest.mark.parametrize(
    "rules",
    [
        Rules(announces_first=False),
        Rules(settles_first=False),
        Rules(asks_the_shards=False),
        Rules(saves_first=False),
    ],
    ids=lambda rules: next(name for name, value in vars(rules).items() if not value),
)
def test_planted_faults_are_found(rules: Rules) -> None:
    found = 0
    for seed in range(40):
        walk = Walk(seed, rules, is_whole=False)
        try:
            walk.go()
        except Exception:  # the coordinator refuses what such a worker asks
            found += 1
            continue
        found += walk.wrong() != ""
    assert found
