"""Commits through a network that cuts, duplicates and swallows: what is applied is what was sent, once."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from fault_proxy import ASSIGN, COMMIT, DELETE, FaultProxy, Faults
from sparserow.cpp_ext import _client, _server
from sparserow.proto.errors import Fenced, InvalidArgument, Unavailable, error_of

SLOTS = 1024
DIM = 4
TABLE = "faults/t"

_server.set_error_factory(error_of)
_client.set_error_factory(error_of)


def make_shard(members=((0, 1, 0),), staleness=None):
    store = _server.Store(slot_count=SLOTS)
    schema = _server.TableSchema(id=_server.id_of_name(TABLE), name=TABLE, dim=DIM)
    store.create_table(schema)
    server = _server.Server(store)
    server.set_route(1, np.zeros(SLOTS, np.uint16))
    server.set_job(1, "job", staleness, list(members))
    return store, server, schema.id


def make_client(port, worker=0):
    return _client.Client(
        shards=[("127.0.0.1", port)],
        slot_owner=np.zeros(SLOTS, np.uint16),
        route_epoch=1,
        job_id=1,
        worker_id=worker,
        worker_epoch=1,
    )


@pytest.mark.parametrize(
    "faults",
    [
        Faults(cut_before=0.2),
        Faults(cut_inside=0.2),
        Faults(cut_after=0.2),
        Faults(duplicate=0.5),
        Faults(late_copy=0.5),
        Faults(delay=0.2, reorder=0.2),
        Faults(swallow_reply=0.2),
        Faults(
            cut_before=0.05,
            cut_inside=0.05,
            cut_after=0.05,
            duplicate=0.1,
            late_copy=0.1,
            delay=0.05,
            reorder=0.05,
            swallow_reply=0.05,
        ),
    ],
    ids=["cut before", "cut inside", "cut after", "duplicate", "late copy", "held back", "lost reply", "all"],
)
def test_every_commit_is_applied_once(faults):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    values = np.random.default_rng(seed)
    store, server, table = make_shard()
    proxy = FaultProxy(server.port, faults, seed)
    try:
        client = make_client(proxy.port)
        sent = np.zeros((500, DIM), np.float64)
        commits = 60
        for sequence in range(1, commits + 1):
            keys = values.choice(500, 200, replace=False)
            # Small integers: their float32 sums are exact, so that one gradient too many or too few shows.
            grads = values.integers(-8, 8, (200, DIM)).astype(np.float32)
            client.push(table, keys, grads, dim=DIM, lr=1.0, sequence=sequence, grad_sum=True)
            sent[keys] -= grads
        rows, _, _ = store.pull(table, np.arange(500, dtype=np.uint64))
        assert np.array_equal(rows, sent.astype(np.float32))
        stats = server.stats()
        assert stats["commits_accepted"] == commits
        assert sum(proxy.counts.values()) > 0
        if faults.swallow_reply or faults.duplicate or faults.late_copy:
            assert stats["commits_duplicate"] > 0
    finally:
        proxy.stop()
        server.stop()


@pytest.mark.parametrize("chance", ["cut_after", "duplicate", "late_copy", "reorder", "swallow_reply"])
def test_rows_set_and_deleted_by_key_are_so_once(chance):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    values = np.random.default_rng(seed)
    store, server, table = make_shard()
    proxy = FaultProxy(server.port, Faults(**{chance: 0.4}, kinds=frozenset({ASSIGN, DELETE, COMMIT})), seed)
    try:
        client = make_client(proxy.port)
        expected: dict[int, float] = {}
        for sequence in range(1, 121):
            keys = values.choice(20, 8, replace=False)
            kind = values.integers(3)
            if kind == 0:
                client.assign(table, keys, np.full((8, DIM), sequence, np.float32), dim=DIM, sequence=sequence)
                expected |= dict.fromkeys(keys.tolist(), float(sequence))
            elif kind == 1:
                existed = client.erase(table, keys, sequence=sequence)
                assert existed == sum(expected.pop(key, None) is not None for key in keys.tolist())
            else:
                grads = np.ones((8, DIM), np.float32)
                client.push(table, keys, grads, dim=DIM, lr=1.0, sequence=sequence, grad_sum=True)
                expected |= {key: expected.get(key, 0.0) - 1.0 for key in keys.tolist()}
        rows, _, found = store.pull(table, np.arange(20, dtype=np.uint64))
        assert np.flatnonzero(found).tolist() == sorted(expected)
        assert rows[:, 0].tolist() == [expected.get(key, 0.0) for key in range(20)]
        assert proxy.counts[chance] > 0
        if chance in ("duplicate", "late_copy", "swallow_reply"):
            assert server.stats()["commits_duplicate"] > 0
    finally:
        proxy.stop()
        server.stop()


def test_who_left_sets_and_deletes_nothing_and_a_job_that_is_over_is_named():
    store, server, table = make_shard()
    try:
        client, keys, rows = make_client(server.port), np.arange(4), np.ones((4, DIM), np.float32)
        client.assign(table, keys, rows, dim=DIM, sequence=1)
        server.set_job(1, "ads/ctr", None, [(0, 2, 0)])
        with pytest.raises(Fenced, match="worker 0 epoch 1 is over; its epoch in job 'ads/ctr' is 2"):
            client.assign(table, keys, 2 * rows, dim=DIM, sequence=2)
        with pytest.raises(Fenced):
            client.erase(table, keys, sequence=2)
        server.drop_job(1)
        for call in (
            lambda: client.assign(table, keys, 2 * rows, dim=DIM, sequence=2),
            lambda: client.erase(table, keys, sequence=2),
            lambda: client.push(table, keys, rows, dim=DIM, lr=1.0, sequence=2),
            lambda: client.pull(table, keys, dim=DIM, step=0),
        ):
            with pytest.raises(Fenced, match="job 'ads/ctr' is over: all its workers have left, or their leases have"):
                call()
        found_rows, _, found = store.pull(table, keys.astype(np.uint64))
        assert found.all()
        assert (found_rows == 1.0).all()
    finally:
        server.stop()


def test_synchronous_workers_behind_faults_agree_with_the_sum():
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    workers, steps = 2, 25
    store, server, table = make_shard([(w, 1, w) for w in range(workers)], staleness=0)
    faults = Faults(cut_before=0.05, cut_inside=0.05, cut_after=0.05, duplicate=0.1, swallow_reply=0.05)
    proxies = [FaultProxy(server.port, faults, seed + w) for w in range(workers)]
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            client = make_client(proxies[worker].port, worker)
            keys = np.arange(100)
            grads = np.full((100, DIM), 2.0, np.float32)
            for step in range(steps):
                rows, _, _ = client.pull(table, keys, dim=DIM, step=step)
                assert (rows == -2.0 * step).all()
                client.push(table, keys, grads, dim=DIM, lr=1.0, sequence=step + 1, step=step)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    try:
        assert not failures
        rows, _, _ = store.pull(table, np.arange(100, dtype=np.uint64))
        assert (rows == -2.0 * steps).all()
        assert server.stats()["steps_reduced"] == steps
    finally:
        for proxy in proxies:
            proxy.stop()
        server.stop()


def test_arguments_are_refused_by_name_and_repeated_keys_are_summed():
    store, server, table = make_shard()
    try:
        client = make_client(server.port)
        keys = np.array([3, 1, 3])
        grads = np.ones((3, DIM), np.float32)
        client.push(table, keys, grads, dim=DIM, lr=1.0, sequence=1)
        rows, versions, found = client.pull(table, np.array([3, 9, 1, 3]), dim=DIM, versions=True, found=True)
        assert rows[:, 0].tolist() == [-2.0, 0.0, -1.0, -2.0]
        assert found.tolist() == [True, False, True, True]
        assert versions[1] == 0
        assert versions[0] > 0
        with pytest.raises(InvalidArgument, match=r"keys\[1\]: -1 is not allowed; allowed: >= 0"):
            client.pull(table, np.array([0, -1]), dim=DIM)
        with pytest.raises(InvalidArgument, match=r"^keys: allowed"):
            client.pull(table, np.array([0.5]), dim=DIM)
        with pytest.raises(InvalidArgument, match=r"^grads: allowed: .*\(3, 4\)"):
            client.push(table, keys, grads[:2], dim=DIM, lr=1.0, sequence=2)
        grads[2, 1] = np.nan
        with pytest.raises(InvalidArgument, match=r"grads: 1 of 3 gradients are not finite, the first is key 3's"):
            client.push(table, keys, grads, dim=DIM, lr=1.0, sequence=2)
        with pytest.raises(InvalidArgument, match="dim 5, the table 4"):
            client.pull(table, keys, dim=5)
        with pytest.raises(Unavailable, match="worker 7 epoch 1 is not known yet as a member"):
            make_client(server.port, worker=7).push(
                table, keys, np.ones((3, DIM), np.float32), dim=DIM, lr=1.0, sequence=1, deadline_ms=200
            )
        assert store.stats()[0].rows == 2
    finally:
        server.stop()
    with pytest.raises(Unavailable, match=r"shard 0 \(127\.0\.0\.1:\d+\): cannot be reached"):
        client.pull(table, np.array([1]), dim=DIM, deadline_ms=200)
