"""A quorum on two shards through a bad network: each step has its members, the same on both, and each counts once."""

from __future__ import annotations

import random
import threading
from collections import Counter

import numpy as np

from fault_proxy import FIVE_PERCENT, FaultProxy
from sparserow.cpp_ext import _client, _server
from sparserow.proto.errors import OutsideQuorum, error_of

SLOTS, SHARDS, WORKERS, QUORUM, STEPS, JOB = 256, 2, 3, 2, 25, 1
KEYS_A_STEP = 16  # that one worker alone changes in a step; both shards own some of them
TABLE = _server.id_of_name("faults/quorum")
ALL = np.arange(KEYS_A_STEP, dtype=np.uint64) + 10**6  # which every member of a step changes

_server.set_error_factory(error_of)
_client.set_error_factory(error_of)


def keys_of(worker: int, step: int) -> np.ndarray:
    return (worker * STEPS + step) * KEYS_A_STEP + np.arange(KEYS_A_STEP, dtype=np.uint64)


class Run:
    """One training of all workers; each behind proxies of its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.owner = np.arange(SLOTS, dtype=np.uint16) % SHARDS
        self.servers = []
        for index in range(SHARDS):
            store = _server.Store(slot_count=SLOTS)
            store.create_table(_server.TableSchema(id=TABLE, name="faults/quorum", dim=1))
            server = _server.Server(store, shard_index=index)
            server.set_route(1, self.owner)
            members = [(worker, 1, worker) for worker in range(WORKERS)]
            server.set_job(JOB, "quorum", 0, members, quorum=QUORUM)
            self.servers.append(server)
        self.proxies = [
            [
                FaultProxy(server.port, FIVE_PERCENT, seed + 10 * worker + index)
                for index, server in enumerate(self.servers)
            ]
            for worker in range(WORKERS)
        ]
        self.taken: list[list[int]] = [[] for _ in range(WORKERS)]
        self.outside = [0] * WORKERS
        self.failures: list[BaseException] = []

    def client(self, ports: list[int], worker: int) -> _client.Client:
        return _client.Client(
            shards=[("127.0.0.1", port) for port in ports],
            slot_owner=self.owner,
            route_epoch=1,
            job_id=JOB,
            worker_id=worker,
            worker_epoch=1,
            has_quorum=True,
        )

    def work(self, worker: int) -> None:
        try:
            client = self.client([proxy.port for proxy in self.proxies[worker]], worker)
            for step in range(STEPS):
                seen, _, _ = client.pull(TABLE, ALL, dim=1, step=step)
                keys = np.concatenate([keys_of(worker, step), ALL])
                grads = np.full((len(keys), 1), -QUORUM, np.float32)
                named = {"sequence": step + 1, "step": step}
                try:
                    client.prepare(TABLE, keys, grads, dim=1, lr=1.0, **named)
                    client.commit_prepared(**named)
                except OutsideQuorum:
                    client.abort(**named)
                    self.outside[worker] += 1
                    continue
                assert (seen == QUORUM * step).all(), "a member saw exactly the steps before its own"
                self.taken[worker].append(step)
        except BaseException as error:
            self.failures.append(error)

    def train(self) -> None:
        threads = [threading.Thread(target=self.work, args=(worker,)) for worker in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not self.failures, self.failures

    def stop(self) -> None:
        for proxies in self.proxies:
            for proxy in proxies:
                proxy.stop()
        for server in self.servers:
            server.stop()


def test_each_step_has_its_quorum_and_each_member_counts_once() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    run = Run(seed)
    try:
        run.train()
        reader = run.client([server.port for server in run.servers], 0)
        for worker in range(WORKERS):
            for step in range(STEPS):
                rows, _, _ = reader.pull(TABLE, keys_of(worker, step), dim=1)
                assert (rows == (step in run.taken[worker])).all(), (worker, step)
        members = Counter(step for steps in run.taken for step in steps)
        assert members == dict.fromkeys(range(STEPS), QUORUM)
        rows, _, _ = reader.pull(TABLE, ALL, dim=1)
        assert (rows == QUORUM * STEPS).all()
        assert sum(run.outside) == STEPS * (WORKERS - QUORUM)
        for server in run.servers:
            stats = server.stats()
            assert (stats["commits_accepted"], stats["steps_reduced"]) == (STEPS * QUORUM, STEPS)
            assert stats["kept_bytes"] == 0
        assert run.servers[0].stats()["commits_outside"] > 0
        suffered: Counter[str] = Counter()
        for proxies in run.proxies:
            for proxy in proxies:
                suffered.update(proxy.counts)
        assert sum(suffered.values()) > 20
    finally:
        run.stop()
