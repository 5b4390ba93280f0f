"""Synchronous training on two shards through a bad network ends in the rows of the run without faults, bit by bit."""

from __future__ import annotations

import random
import threading
from collections import Counter

import numpy as np

from fault_proxy import FIVE_PERCENT, FaultProxy, Faults
from sparserow.cpp_ext import _client, _server
from sparserow.proto.errors import error_of

SLOTS, SHARDS, WORKERS, STEPS, DIM, ROWS, JOB = 256, 2, 2, 30, 8, 120, 1
TABLE = _server.id_of_name("faults/train")

_server.set_error_factory(error_of)
_client.set_error_factory(error_of)


class Run:
    """One training; ``faults`` None is a network that does nothing."""

    def __init__(self, seed: int, faults: Faults | None) -> None:
        self.seed = seed
        self.owner = np.arange(SLOTS, dtype=np.uint16) % SHARDS
        self.servers = []
        for index in range(SHARDS):
            store = _server.Store(slot_count=SLOTS)
            store.create_table(_server.TableSchema(id=TABLE, name="faults/train", dim=DIM))
            server = _server.Server(store, shard_index=index)
            server.set_route(1, self.owner)
            server.set_job(JOB, "train", 0, [(worker, 1, worker) for worker in range(WORKERS)])
            self.servers.append(server)
        self.proxies = [
            [FaultProxy(server.port, faults or Faults(), seed + 10 * worker + index)
             for index, server in enumerate(self.servers)]
            for worker in range(WORKERS)
        ]  # fmt: skip
        self.sent = [0] * WORKERS
        self.failures: list[BaseException] = []

    def client(self, ports: list[int], worker: int) -> _client.Client:
        return _client.Client(
            shards=[("127.0.0.1", port) for port in ports],
            slot_owner=self.owner,
            route_epoch=1,
            job_id=JOB,
            worker_id=worker,
            worker_epoch=1,
        )

    def work(self, worker: int) -> None:
        try:
            client = self.client([proxy.port for proxy in self.proxies[worker]], worker)
            values = np.random.default_rng(self.seed + 100 + worker)
            sequence = 0
            for step in range(STEPS):
                keys = values.choice(ROWS, 40, replace=False).astype(np.uint64)
                rows, _, _ = client.pull(TABLE, keys, dim=DIM, step=step)
                # What a step adds depends on what it read: a wrong row anywhere would spread.
                grads = (0.3 * rows + values.standard_normal((40, DIM))).astype(np.float32)
                if values.random() < 0.2:  # a try that is given up, as for a gradient that is not finite
                    sequence += 1
                    client.prepare(TABLE, keys, grads + 1, dim=DIM, lr=0.1, sequence=sequence, step=step)
                    client.abort(sequence=sequence, step=step)
                sequence += 1
                client.prepare(TABLE, keys, grads, dim=DIM, lr=0.1, sequence=sequence, step=step)
                client.commit_prepared(sequence=sequence, step=step)
                self.sent[worker] += 1
        except BaseException as error:
            self.failures.append(error)

    def rows(self) -> np.ndarray:
        """Trains, and reads the rows past all proxies."""
        threads = [threading.Thread(target=self.work, args=(worker,)) for worker in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not self.failures, self.failures
        rows, _, _ = self.client([server.port for server in self.servers], 0).pull(
            TABLE, np.arange(ROWS, dtype=np.uint64), dim=DIM, step=STEPS
        )
        return rows

    def stop(self) -> None:
        for proxies in self.proxies:
            for proxy in proxies:
                proxy.stop()
        for server in self.servers:
            server.stop()


def test_rows_are_those_of_the_run_without_faults() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    plain, faulty = Run(seed, None), Run(seed, FIVE_PERCENT)
    try:
        expected, rows = plain.rows(), faulty.rows()
        assert np.array_equal(rows.view(np.uint32), expected.view(np.uint32))
        assert expected.any()
        suffered: Counter[str] = Counter()
        for proxies in faulty.proxies:
            for proxy in proxies:
                suffered.update(proxy.counts)
        assert sum(suffered.values()) > 20
        for run in (plain, faulty):
            assert run.sent == [STEPS] * WORKERS
            for server in run.servers:
                assert server.stats()["commits_accepted"] == STEPS * WORKERS
                assert server.stats()["steps_reduced"] == STEPS
    finally:
        plain.stop()
        faulty.stop()
