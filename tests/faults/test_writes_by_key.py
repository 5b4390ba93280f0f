"""Writes by key of one session: from several threads, beside steps, and after a COMMIT that one shard never got."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import sparserow as sr
from fault_proxy import COMMIT, FaultProxy, Faults
from sparserow.cpp_ext import _client, _server
from sparserow.proto.errors import DataLoss, SparserowError, error_of

DIM = 4
SLOTS = 1024
TABLE = "faults/t"
KEYS = np.arange(16, dtype=np.uint64)  # on both shards
ONES = np.ones((len(KEYS), DIM), np.float32)

_server.set_error_factory(error_of)
_client.set_error_factory(error_of)


@pytest.mark.parametrize("shards", [1, 2])
def test_threads_that_push_through_one_session_lose_and_double_nothing(shards: int) -> None:
    threads, pushes = 8, 250
    with sr.local_cluster(shards=shards) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))

        def push(_: int) -> None:
            for _ in range(pushes):
                table.push(KEYS, -ONES)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(push, range(threads)))
        assert table.pull(KEYS).tolist() == (threads * pushes * ONES).tolist()


def test_steps_beside_threads_that_write_by_key_are_all_applied() -> None:
    steps = 200
    stored = np.array([900, 901], np.uint64)
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, "ads", staleness=0) as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        native = session.core.native
        is_over = threading.Event()

        def write() -> None:
            while not is_over.is_set():
                table.assign(stored, np.zeros((2, DIM), np.float32))
                table.push(KEYS, -ONES)
                counts.append(1)

        counts: list[int] = []
        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(write) for _ in range(2)]
            try:
                for step in range(steps):
                    native.seal(1.0)
                    native.prepare()
                    native.commit_prepared()
                    assert native.step == step + 1
            finally:
                is_over.set()
            for writer in writers:
                writer.result()
        assert counts
        assert table.pull(KEYS).tolist() == (len(counts) * ONES).tolist()


def test_a_push_whose_reply_is_garbage_may_be_applied() -> None:
    table = _server.id_of_name(TABLE)
    store = _server.Store(slot_count=SLOTS)
    store.create_table(_server.TableSchema(id=table, name=TABLE, dim=DIM))
    server = _server.Server(store)
    server.set_route(1, np.zeros(SLOTS, np.uint16))
    server.set_job(1, "job", None, [(0, 1, 0)])
    proxy = FaultProxy(server.port, Faults(), seed=1)
    try:
        client = _client.Client(
            shards=[("127.0.0.1", proxy.port)],
            slot_owner=np.zeros(SLOTS, np.uint16),
            route_epoch=1,
            job_id=1,
            worker_id=0,
            worker_epoch=1,
            replay_bytes=1 << 20,
        )
        session = _client.NativeSession(
            client.shards, first_step=0, first_sequence=1, clocked=False, grad_sum=True, deadline_ms=30_000
        )
        rows = _client.TableAccess(session, name="t", table_id=table, schema_version=1, dim=DIM)
        rows.push(KEYS, -ONES, 1.0)
        proxy.faults = Faults(garble_reply=1.0)
        with pytest.raises(DataLoss) as error:
            rows.push(KEYS, -ONES, 1.0)
        assert error.value.may_be_applied
        proxy.faults = Faults()
        assert rows.pull(KEYS).tolist() == (2 * ONES).tolist()
        session.close()
    finally:
        proxy.stop()
        server.stop()


def test_a_push_that_one_shard_never_got_is_finished_before_the_next() -> None:
    stores, servers, proxies = [], [], []
    owner = (np.arange(SLOTS) % 2).astype(np.uint16)
    table = _server.id_of_name(TABLE)
    try:
        for shard in range(2):
            store = _server.Store(slot_count=SLOTS)
            store.create_table(_server.TableSchema(id=table, name=TABLE, dim=DIM))
            server = _server.Server(store, shard_index=shard)
            server.set_route(1, owner)
            server.set_job(1, "job", None, [(0, 1, 0)])
            stores.append(store)
            servers.append(server)
            proxies.append(FaultProxy(server.port, Faults(), seed=shard))
        client = _client.Client(
            shards=[("127.0.0.1", proxy.port) for proxy in proxies],
            slot_owner=owner,
            route_epoch=1,
            job_id=1,
            worker_id=0,
            worker_epoch=1,
        )
        session = _client.NativeSession(
            client.shards, first_step=0, first_sequence=1, clocked=False, grad_sum=True, deadline_ms=1500
        )
        rows = _client.TableAccess(session, name="t", table_id=table, schema_version=1, dim=DIM)

        proxies[1].faults = Faults(cut_before=1.0, kinds=frozenset({COMMIT}))
        with pytest.raises(SparserowError) as first:
            rows.push(KEYS, -ONES, 1.0)
        assert first.value.may_be_applied
        applied = {tuple(row) for row in rows.pull(KEYS).tolist()}
        assert applied == {(0.0,) * DIM, (1.0,) * DIM}  # one shard has it, the other not yet
        with pytest.raises(SparserowError, match="in doubt still, and nothing of this write was sent") as second:
            rows.push(KEYS, -ONES, 1.0)
        assert not second.value.may_be_applied

        proxies[1].faults = Faults()
        rows.push(KEYS, -ONES, 1.0)
        assert rows.pull(KEYS).tolist() == (2 * ONES).tolist()
        session.close()
    finally:
        for proxy in proxies:
            proxy.stop()
        for server in servers:
            server.stop()
