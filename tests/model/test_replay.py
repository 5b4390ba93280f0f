"""Random schedules against real shards: prepare, commit and abort, interleaved, sent again, late, of a fenced epoch.

Workers commit through the data plane of two servers at staleness 0. Rows must be the reduction of the deduplicated
commits, and a pull of step t must see exactly the steps before t; both are computed here one step at a time.
Gradients are small integers and N is a power of two, so that every sum is exact and rows compare bit-equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from sparserow.cpp_ext import _client, _server
from sparserow.proto import errors

for native in (_client, _server):
    native.set_error_factory(errors.error_of)

TABLE = _server.id_of_name("model/replay")
DIM, KEYS, WORKERS, STEPS, SHARDS, SLOTS, JOB = 3, 12, 4, 5, 2, 64, 7
ALL_KEYS = np.arange(KEYS, dtype=np.uint64)
EPOCH = 2  # of the job's members; 1 is over


class Replay:
    """Two servers, one job, and the rows that they must have after each step."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.owner = np.arange(SLOTS, dtype=np.uint16) % SHARDS
        self.servers = []
        members = [(worker, EPOCH, worker) for worker in range(WORKERS)]
        for index in range(SHARDS):
            store = _server.Store(slot_count=SLOTS)
            store.create_table(_server.TableSchema(id=TABLE, name="model/replay", dim=DIM))
            server = _server.Server(store, shard_index=index)
            server.set_route(1, self.owner)
            server.set_job(JOB, "replay", 0, members)
            self.servers.append(server)
        self.clients = [self.client(worker, EPOCH) for worker in range(WORKERS)]
        self.zombie = self.client(0, EPOCH - 1)
        self.rows = [np.zeros((KEYS, DIM), np.float64)]  # after 0, 1, ... steps
        self.sums = np.zeros((KEYS, DIM), np.float64)
        self.committed = [0] * WORKERS  # steps
        self.fenced = self.repeated = self.waited = 0

    def client(self, worker: int, epoch: int) -> _client.Client:
        shards = [("127.0.0.1", server.port) for server in self.servers]
        return _client.Client(
            shards=shards, slot_owner=self.owner, route_epoch=1, job_id=JOB, worker_id=worker, worker_epoch=epoch
        )

    def gradients(self) -> tuple[np.ndarray, np.ndarray]:
        keys = np.array(self.rng.sample(range(KEYS), self.rng.randint(0, KEYS)), dtype=np.uint64)
        grads = np.array([[self.rng.randint(-8, 8) for _ in range(DIM)] for _ in keys], dtype=np.float32)
        return keys, grads.reshape(len(keys), DIM)

    def prepare(self, client: _client.Client, step: int, sequence: int, keys: np.ndarray, grads: np.ndarray) -> None:
        client.prepare(TABLE, keys, grads, dim=DIM, lr=1.0, sequence=sequence, step=step)

    def worker(self, worker: int) -> Iterator[None]:
        """One worker's calls; the scheduler interleaves between them."""
        client, sequence = self.clients[worker], 0
        for step in range(STEPS):
            if min(self.committed) < step and self.rng.random() < 0.3:
                with pytest.raises(errors.DeadlineExceeded):
                    client.pull(TABLE, ALL_KEYS, dim=DIM, step=step, deadline_ms=5)
                self.waited += 1
            while min(self.committed) < step:
                yield
            rows, _, _ = client.pull(TABLE, ALL_KEYS, dim=DIM, step=step)
            np.testing.assert_array_equal(rows, self.rows[step])
            sequence += 1
            while self.rng.random() < 0.3:  # a try that ends in ABORT, and is tried again
                self.prepare(client, step, sequence, *self.gradients())
                yield
                client.abort(sequence=sequence, step=step)
                sequence += 1
            keys, grads = self.gradients()
            for _ in range(self.rng.randint(1, 2)):
                self.prepare(client, step, sequence, keys, grads)
                yield
            client.commit_prepared(sequence=sequence, step=step)
            self.count(worker, keys, grads)
            while self.rng.random() < 0.4:  # sent again: this commit, or PREPARE of it, late
                yield
                client.commit_prepared(sequence=sequence, step=step)
                self.prepare(client, step, sequence, keys, grads)
                self.repeated += 1
            yield

    def count(self, worker: int, keys: np.ndarray, grads: np.ndarray) -> None:
        self.sums[keys.astype(np.int64)] += grads.astype(np.float64)
        self.committed[worker] += 1
        if min(self.committed) == len(self.rows):  # the last worker of the step: it is reduced
            self.rows.append(self.rows[-1] - self.sums / WORKERS)
            self.sums[:] = 0.0

    def haunt(self) -> None:
        """A worker whose epoch is over tries everything."""
        keys, grads = self.gradients()
        step = min(self.committed)
        with pytest.raises(errors.Fenced):
            self.zombie.pull(TABLE, ALL_KEYS, dim=DIM, step=step)
        with pytest.raises(errors.Fenced):
            self.prepare(self.zombie, step, 100 + step, keys, grads)
        with pytest.raises(errors.Fenced):
            self.zombie.commit_prepared(sequence=100 + step, step=step)
        self.fenced += 1

    def run(self) -> None:
        running = [self.worker(worker) for worker in range(WORKERS)]
        while running:
            if self.rng.random() < 0.1:
                self.haunt()
            program = self.rng.choice(running)
            try:
                next(program)
            except StopIteration:
                running.remove(program)
        rows, _, _ = self.clients[0].pull(TABLE, ALL_KEYS, dim=DIM)
        np.testing.assert_array_equal(rows, self.rows[STEPS])
        for server in self.servers:
            server.stop()


def test_real_shards_keep_the_models_promises() -> None:
    fenced = repeated = waited = 0
    for seed in range(30):
        print(f"seed {seed}")
        replay = Replay(seed)
        replay.run()
        fenced += replay.fenced
        repeated += replay.repeated
        waited += replay.waited
    assert min(fenced, repeated, waited) > 0
