"""Random schedules of a job with a quorum against real shards, with workers that die or leave anywhere.

The coordinator's decisions are those of its own ``Roster``. Workers die before PREPARE, before the naming shard has
their COMMIT, or after it and before the other shard has it. Each (worker, step) has keys of its own, so rows say who
the members of a step are, on which shard, and by how many their gradients were divided. Gradients are multiples of 12
and at most four workers count, so every quotient is exact.
"""

from __future__ import annotations

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

TABLE = _server.id_of_name("model/quorum")
WORKERS, STEPS, SHARDS, SLOTS, JOB, KEYS_A_STEP = 4, 8, 2, 64, 7, 6
GRADIENT = 12.0


def keys_of(worker: int, step: int) -> np.ndarray:
    return (worker * STEPS + step) * KEYS_A_STEP + np.arange(KEYS_A_STEP, dtype=np.uint64)


@dataclass
class Worker:
    """A worker, and what it has in doubt: the sequence and the step that the naming shard has, and another lacks."""

    ticket: Ticket
    client: _client.Client
    naming: _client.Client  # of the naming shard alone
    program: Iterator[None] | None = None
    half_named: tuple[int, int] | None = None
    committed: list[tuple[int, int]] = field(default_factory=list)  # (sequence, step), by every shard
    refused: list[tuple[int, int]] = field(default_factory=list)


class Replay:
    def __init__(self, seed: int, quorum: int) -> None:
        self.rng, self.quorum = random.Random(seed), quorum
        self.owner = np.arange(SLOTS, dtype=np.uint16) % SHARDS
        self.servers = []
        for index in range(SHARDS):
            store = _server.Store(slot_count=SLOTS)
            store.create_table(_server.TableSchema(id=TABLE, name="model/quorum", dim=1))
            server = _server.Server(store, shard_index=index)
            server.set_route(1, self.owner)
            self.servers.append(server)
        self.roster = Roster("model/quorum", 0, 1, quorum=quorum)
        self.operation = 0
        self.members: dict[int, set[int]] = {step: set() for step in range(STEPS)}  # as the naming shard took them
        self.counts = dict.fromkeys(("outside", "died", "half named", "left", "short"), 0)
        tickets = [Ticket(JOB, rank, rank + 1, 1) for rank in range(WORKERS)]
        self.live = [Worker(ticket, self.client(ticket, SHARDS), self.client(ticket, 1)) for ticket in tickets]
        self.everyone = list(self.live)
        self.change([], tickets)
        for worker in self.live:
            worker.program = self.play(worker)

    def client(self, ticket: Ticket, shards: int) -> _client.Client:
        return _client.Client(
            shards=[("127.0.0.1", server.port) for server in self.servers[:shards]],
            slot_owner=self.owner % shards,
            route_epoch=1,
            job_id=JOB,
            worker_id=ticket.worker_id,
            worker_epoch=1,
            has_quorum=True,
        )

    def change(self, gone: list[Worker], newcomers: list[Ticket]) -> None:
        """One operation of the coordinator; the shards are told in any order, some twice."""
        self.operation += 1
        fence = [(worker.ticket.worker_id, 1) for worker in gone]
        reports = []
        for server in self.servers:
            windows = server.freeze_job(JOB, self.operation, fence)
            reports.append({(worker, epoch): CommitWindow(seq, step) for worker, epoch, seq, step, *_ in windows})
        self.live = [worker for worker in self.live if worker not in gone]
        self.roster.decide(self.operation, fence, reports, [worker.ticket for worker in self.live] + newcomers)
        spans = [
            (span.worker_id, span.epoch, span.rank, span.first_step, span.until_step, span.final_sequence, b"")
            for span in self.roster.spans.values()
        ]
        for server in self.rng.sample(self.servers, SHARDS):
            for _ in range(self.rng.randint(1, 2)):
                server.set_job(
                    JOB, "model/quorum", 0, spans, generation=1, operation=self.operation, quorum=self.quorum
                )

    def needed(self, step: int) -> int:
        counted = sum(
            span.until_step is None or step <= span.until_step
            for span in self.roster.spans.values()
            if span.first_step <= step
        )
        return min(self.quorum, counted)

    def is_full(self, step: int) -> bool:
        return len(self.members[step]) >= self.needed(step)

    def is_applied(self, step: int) -> bool:
        """Whether both shards have the COMMIT of every member."""
        halves = {worker.half_named[1] for worker in self.live if worker.half_named is not None}
        return all(self.is_full(before) and before not in halves for before in range(step + 1))

    def play(self, worker: Worker) -> Iterator[None]:
        """A worker's calls; the scheduler interleaves, and death comes, between them."""
        rank, sequence, step = worker.ticket.rank, 0, 0
        while step < STEPS:
            while step > 0 and not self.is_applied(step - 1):
                yield
            worker.client.pull(TABLE, keys_of(rank, step), dim=1, step=step, deadline_ms=10_000)
            yield
            sequence += 1
            named = {"sequence": sequence, "step": step}
            grads = np.full((KEYS_A_STEP, 1), -GRADIENT, np.float32)
            try:
                for _ in range(self.rng.randint(1, 2)):
                    worker.client.prepare(TABLE, keys_of(rank, step), grads, dim=1, lr=1.0, **named)
                    yield
                full = self.is_full(step)
                worker.naming.commit_prepared(**named)
                assert not full, "the naming shard took a member too many"
                self.members[step].add(rank)
                worker.half_named = (sequence, step)
                if self.rng.random() < 0.5:
                    yield
                worker.client.commit_prepared(**named)
                worker.half_named = None
                worker.committed.append((sequence, step))
                step += 1
            except errors.OutsideQuorum:
                assert self.is_full(step)
                self.counts["outside"] += 1
                worker.client.abort(**named)
                worker.refused.append((sequence, step))
                step = next((later for later in range(step, STEPS) if not self.is_full(later)), STEPS)
            yield

    def go(self, gone: list[Worker], how: str) -> None:
        """Workers die, or leave, wherever they are. What they repeat is answered as before."""
        self.counts[how] += len(gone)
        self.counts["half named"] += sum(worker.half_named is not None for worker in gone)
        self.change(gone, [])
        for worker in gone:
            worker.program = None
            if worker.half_named is not None:
                worker.committed.append(worker.half_named)
            for sequence, step in worker.committed:
                worker.client.commit_prepared(sequence=sequence, step=step)
            for sequence, step in worker.refused:
                with pytest.raises(errors.Fenced):
                    worker.client.commit_prepared(sequence=sequence, step=step)

    def run(self) -> None:
        while running := [worker for worker in self.live if worker.program is not None]:
            if self.rng.random() < 0.02 and len(self.live) > 1:
                self.go(self.rng.sample(self.live, self.rng.randint(1, len(self.live) - 1)), "died")
                continue
            worker = self.rng.choice(running)
            assert worker.program is not None
            if next(worker.program, "over") == "over":
                self.go([worker], "left")
        self.check()
        for server in self.servers:
            server.stop()

    def check(self) -> None:
        reader = _client.Client(
            shards=[("127.0.0.1", server.port) for server in self.servers], slot_owner=self.owner, route_epoch=1
        )
        for step in range(STEPS):
            members = self.members[step]
            assert 1 <= len(members) <= self.quorum
            self.counts["short"] += len(members) < self.quorum
            for worker in self.everyone:
                rank = worker.ticket.rank
                rows, _, _ = reader.pull(TABLE, keys_of(rank, step), dim=1)
                assert (rows == (GRADIENT / len(members) if rank in members else 0.0)).all(), (step, rank, members)
        for server in self.servers:
            assert server.stats()["kept_bytes"] == 0
            assert server.stats()["steps_reduced"] == STEPS


@pytest.mark.parametrize("quorum", [1, 2, 3, 4])
def test_each_step_has_its_members_on_every_shard(quorum: int) -> None:
    first = int(os.environ.get("SPARSEROW_TEST_SEED", "0"))
    total: dict[str, int] = {}
    for seed in range(first, first + (500 if FULL else 25)):
        print(f"seed {seed}")
        replay = Replay(seed, quorum)
        replay.run()
        for name, count in replay.counts.items():
            total[name] = total.get(name, 0) + count
    wanted = {"died", "half named", "left"} | ({"short"} if quorum > 1 else set())
    wanted |= {"outside"} if quorum < WORKERS else set()
    assert all(total[name] > 0 for name in wanted), total
