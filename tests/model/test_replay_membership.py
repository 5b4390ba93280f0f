"""Random schedules with workers that come, leave and die, against real shards, at every staleness.

The coordinator's decisions are those of its own ``Roster``. Workers die anywhere: before PREPARE, in doubt on both
shards, or with a commit that only shard 0 has taken. Rows must be those of the commits that count: of all that were
acknowledged, and of one in doubt all shards' parts or none. N is 2, 3 or 4 and gradients are multiples of 24, so that
every sum is exact and rows compare bit-equal.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from long_form import FULL
from sparserow.cpp_ext import _client, _server
from sparserow.proto import errors
from sparserow.ps_server.coordinator.state.membership import Ticket
from sparserow.ps_server.coordinator.state.roster import CommitWindow, Roster

for native in (_client, _server):
    native.set_error_factory(errors.error_of)

TABLE = _server.id_of_name("model/members")
DIM, KEYS, STEPS, SHARDS, SLOTS, JOB = 2, 12, 8, 2, 64, 7
ALL_KEYS = np.arange(KEYS, dtype=np.uint64)


def proof_of(worker_id: int) -> bytes:
    """What a worker shows to the shards as its own."""
    return worker_id.to_bytes(16, "little")


@dataclass
class Worker:
    """One epoch of a worker, with the gradients (KEYS, DIM) of each of its commits that counts, by step."""

    ticket: Ticket
    first_step: int
    client: _client.Client
    only_shard_0: _client.Client
    commits: dict[int, np.ndarray] = field(default_factory=dict)
    in_doubt: tuple[int, np.ndarray] | None = None  # prepared everywhere
    taken_by_shard_0: bool = False
    sequence: int = 0  # of the last commit that was prepared
    committed: list[tuple[int, int]] = field(default_factory=list)  # (sequence, step), in doubt no more
    program: Iterator[None] | None = None
    until_step: int | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.ticket.worker_id, self.ticket.epoch


class Replay:
    def __init__(self, seed: int, staleness: int | None) -> None:
        self.rng = random.Random(seed)
        self.staleness = staleness
        self.owner = np.arange(SLOTS, dtype=np.uint16) % SHARDS
        self.servers = []
        for index in range(SHARDS):
            store = _server.Store(slot_count=SLOTS)
            store.create_table(_server.TableSchema(id=TABLE, name="model/members", dim=DIM))
            server = _server.Server(store, shard_index=index)
            server.set_route(1, self.owner)
            self.servers.append(server)
        self.roster = Roster("model/members", staleness, 1)
        self.operation = 0
        self.next_id = 1
        self.workers: list[Worker] = []
        self.rows = np.zeros((KEYS, DIM), np.float64)  # k and async: as applied so far
        self.counts = dict.fromkeys(("died", "in doubt", "half taken", "left", "came", "held", "waited"), 0)
        self.change([], 4)

    # ---- what the coordinator does

    def change(self, gone: list[Worker], coming: int) -> None:
        """One operation: these leave or are dead, and so many come."""
        self.operation += 1
        fence = [worker.key for worker in gone]
        reports = []
        for server in self.servers:
            windows = server.freeze_job(JOB, self.operation, fence)
            reports.append({(worker, epoch): CommitWindow(seq, step) for worker, epoch, seq, step, *_ in windows})
        live = [worker for worker in self.live() if worker not in gone]
        if live and self.rng.random() < 0.5:  # a commit of the time between; one that changes nothing if it is late
            with pytest.raises(errors.Unavailable, match="members of job 'members' are being changed"):
                live[0].client.commit_prepared(sequence=900, deadline_ms=100)
            self.counts["held"] += 1
        tickets = [Ticket(JOB, self.next_id + i, self.next_id + i, 1) for i in range(coming)]
        self.next_id += coming
        self.roster.decide(self.operation, fence, reports, [worker.ticket for worker in live] + tickets)
        for worker in gone:
            self.depart(worker)
        spans = [
            (
                span.worker_id,
                span.epoch,
                span.rank,
                span.first_step,
                span.until_step,
                span.final_sequence,
                hashlib.sha256(proof_of(span.worker_id)).digest(),
            )
            for span in self.roster.spans.values()
        ]
        for server in self.rng.sample(self.servers, SHARDS):
            for _ in range(self.rng.randint(1, 2)):  # told twice at times
                server.set_job(JOB, "members", self.staleness, spans, generation=1, operation=self.operation)
        for ticket in tickets:
            first = self.roster.spans[ticket.worker_id, 1].first_step
            worker = Worker(ticket, first, self.client(ticket), self.client(ticket, shards=1))
            worker.program = self.play(worker)
            self.workers.append(worker)

    def depart(self, worker: Worker) -> None:
        """What the rules say becomes of a worker that is gone."""
        if worker.in_doubt is not None and worker.taken_by_shard_0:
            worker.committed.append((worker.sequence, worker.in_doubt[0]))
            self.take(worker, *worker.in_doubt)
        own = max(worker.commits, default=-1)
        top = max((max(other.commits, default=-1) for other in self.workers), default=-1)
        until = own if self.staleness == 0 else max(own, top)
        worker.until_step = max(until, worker.first_step - 1)
        worker.program = None

    # ---- what rows must be

    def live(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.until_step is None]

    def counted(self, step: int) -> list[Worker]:
        return [
            worker
            for worker in self.workers
            if worker.first_step <= step and (worker.until_step is None or step <= worker.until_step)
        ]

    def take(self, worker: Worker, step: int, grads: np.ndarray) -> None:
        if self.staleness != 0:
            self.rows -= grads / len(self.counted(step))
        worker.commits[step] = grads

    def rows_before(self, step: int) -> np.ndarray:
        """Rows that a pull of ``step`` must see, once it may read."""
        if self.staleness != 0:
            return self.rows
        rows = np.zeros((KEYS, DIM), np.float64)
        for earlier in range(step):
            counted = self.counted(earlier)
            rows -= sum((worker.commits[earlier] for worker in counted), np.zeros((KEYS, DIM))) / max(1, len(counted))
        return rows

    def missing(self, step: int) -> bool:
        """Whether a pull of ``step`` must wait."""
        if self.staleness is None:
            return False
        bound = step - 1 - self.staleness
        return any(
            earlier not in worker.commits
            for earlier in range(bound + 1)
            for worker in (self.counted(earlier) if self.staleness == 0 else self.live())
            if worker.first_step <= earlier
        )

    # ---- what a worker does

    def client(self, ticket: Ticket, shards: int = SHARDS) -> _client.Client:
        return _client.Client(
            shards=[("127.0.0.1", server.port) for server in self.servers[:shards]],
            slot_owner=self.owner % shards,
            route_epoch=1,
            job_id=JOB,
            worker_id=ticket.worker_id,
            worker_epoch=ticket.epoch,
            worker_proof=proof_of(ticket.worker_id),
        )

    def play(self, worker: Worker) -> Iterator[None]:
        """Its calls; the scheduler interleaves, and death comes, between them."""
        sequence = 0
        for step in range(worker.first_step, STEPS):
            if self.missing(step) and self.rng.random() < 0.1:
                # Unavailable, because the members of the job may be changing all the while.
                with pytest.raises((errors.DeadlineExceeded, errors.Unavailable)):
                    worker.client.pull(TABLE, ALL_KEYS, dim=DIM, step=step, deadline_ms=5)
                self.counts["waited"] += 1
            while self.missing(step):
                yield
            rows, _, _ = worker.client.pull(TABLE, ALL_KEYS, dim=DIM, step=step, deadline_ms=10_000)
            np.testing.assert_array_equal(rows, self.rows_before(step))
            yield
            grads = np.array([[self.rng.randint(-4, 4) * 24 for _ in range(DIM)] for _ in range(KEYS)], np.float32)
            sequence += 1
            while self.rng.random() < 0.2:  # given up, and a late copy of its PREPARE
                for _ in range(2):
                    worker.client.prepare(TABLE, ALL_KEYS, grads + 1, dim=DIM, lr=1.0, sequence=sequence, step=step)
                    worker.client.abort(sequence=sequence, step=step)
                sequence += 1
            worker.client.prepare(TABLE, ALL_KEYS, grads, dim=DIM, lr=1.0, sequence=sequence, step=step)
            worker.in_doubt, worker.taken_by_shard_0 = (step, grads.astype(np.float64)), False
            worker.sequence = sequence
            yield
            if self.rng.random() < 0.5 and self.staleness == 0:  # at k its rows would be seen on shard 0 alone
                worker.only_shard_0.commit_prepared(sequence=sequence, step=step)
                worker.taken_by_shard_0 = True
                yield
            worker.client.commit_prepared(sequence=sequence, step=step)
            worker.committed.append((sequence, step))
            self.take(worker, *worker.in_doubt)
            worker.in_doubt = None
            if self.rng.random() < 0.3:
                worker.client.commit_prepared(sequence=sequence, step=step)
            yield

    def die(self) -> None:
        """Two die wherever they are: what they repeat is answered as before, and nothing new counts any more."""
        gone = self.rng.sample(self.live(), 2)
        self.counts["died"] += 2
        self.counts["in doubt"] += sum(worker.in_doubt is not None for worker in gone)
        self.counts["half taken"] += sum(worker.in_doubt is not None and worker.taken_by_shard_0 for worker in gone)
        self.change(gone, 0)
        for worker in gone:
            for sequence, step in worker.committed:
                worker.client.commit_prepared(sequence=sequence, step=step)
            with pytest.raises(errors.Fenced):
                worker.client.commit_prepared(sequence=worker.sequence + 1, step=STEPS)

    def run(self) -> None:
        while True:
            runnable = [worker for worker in self.live() if worker.program is not None]
            if not runnable:
                break
            chance = self.rng.random()
            if chance < 0.01 and len(self.live()) == 4:
                self.die()
                continue
            if chance < 0.02 and len(self.live()) == 2 and max(self.roster_steps()) < STEPS - 2:
                self.counts["came"] += 2
                self.change([], 2)
                continue
            worker = self.rng.choice(runnable)
            assert worker.program is not None
            if next(worker.program, "over") == "over":
                worker.program = None
        self.counts["left"] += len(self.live())
        final = self.live()
        self.change(final, 0)
        reader = _client.Client(
            shards=[("127.0.0.1", server.port) for server in self.servers], slot_owner=self.owner, route_epoch=1
        )
        rows, _, _ = reader.pull(TABLE, ALL_KEYS, dim=DIM)
        np.testing.assert_array_equal(rows, self.rows_before(STEPS))
        assert all(server.stats()["kept_bytes"] == 0 for server in self.servers)
        for server in self.servers:
            server.stop()

    def roster_steps(self) -> list[int]:
        return [max(worker.commits, default=-1) for worker in self.workers]


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_members_that_come_and_go_leave_the_rows_that_count(staleness: int | None) -> None:
    first = int(os.environ.get("SPARSEROW_TEST_SEED", "0"))
    total: dict[str, int] = {}
    for seed in range(first, first + (500 if FULL else 25)):
        print(f"seed {seed}")
        replay = Replay(seed, staleness)
        replay.run()
        for name, count in replay.counts.items():
            total[name] = total.get(name, 0) + count
    wanted = {"died", "in doubt", "left", "came", "held"} | ({"half taken"} if staleness == 0 else set())
    assert all(total[name] > 0 for name in wanted), total
