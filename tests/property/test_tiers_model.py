"""Random operations on a store whose memory holds one row in a hundred: what it gives is what a dict and a store
without an SSD give, bit for bit, restarts from a checkpoint's images too. A million operations on keys with
SPARSEROW_TEST_FULL=1."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from long_form import FULL
from sparserow.cpp_ext import _server
from sparserow.proto.errors import ResourceExhausted, error_of
from store_images import go_on_from, install_page

OPERATIONS = 1_000_000 if FULL else 40_000
ROWS = 300_000 if FULL else 60_000
RESTARTS = 4
DIM = 8
LR = 0.1
SLOTS = 4
TABLES = (1, 2)
VERSIONS = 1  # which array of a pull and of a scan
ROW_BYTES = 2 * DIM * 4
INDEX_BYTES = {"pages": 13, "rocksdb": 0}  # of the memory budget, for a row on the SSD


def schema(table: int) -> _server.TableSchema:
    return _server.TableSchema(
        id=table,
        name=f"n/t{table}",
        dim=DIM,
        dtype="float32" if table == 1 else "bfloat16",
        seed=5,
        init=_server.InitSpec(kind="uniform", a=-1.0, b=1.0),
        optimizer=_server.OptimizerSpec(kind="adagrad" if table == 1 else "adam", eps=1e-8),
    )


def make_stores(
    folder: Path, budget: int, options: dict[str, Any], lineage: int = 1
) -> tuple[_server.Store, _server.Store]:
    _server.set_error_factory(error_of)
    folder.mkdir(exist_ok=True)
    tiered = _server.Store(
        memory_budget_bytes=budget,
        slot_count=SLOTS,
        ssd_path=str(folder),
        **options,
        cluster_id=9,
        shard=3,
        lineage=lineage,
    )
    plain = _server.Store(slot_count=SLOTS, lineage=lineage)
    for store in (tiered, plain):
        for table in TABLES:
            store.create_table(schema(table))
    return tiered, plain


def assert_same(left: tuple, right: tuple) -> None:
    """But for versions: of the rows of one push, one that waits for the SSD may get its own after the others."""
    for array, (one, other) in enumerate(zip(left, right, strict=True)):
        if array == VERSIONS:
            one, other = one > 0, other > 0
        np.testing.assert_array_equal(one, other)


def last_versions(store: _server.Store) -> np.ndarray:
    """By slot, the last version that was given."""
    snapshot = store.snapshot()
    versions = snapshot.slot_versions
    snapshot.end()
    return versions


def check_versions(table: int, keys: np.ndarray, versions: np.ndarray, last: np.ndarray) -> None:
    """Each row of a slot has a version of its own, and none that was not given."""
    slots = _server.slots_of(table, keys, SLOTS)
    assert len(np.unique(np.stack([slots.astype(np.uint64), versions]), axis=1).T) == len(keys)
    assert (versions <= last[slots]).all()


def scan_all(store: _server.Store, table: int, page: int) -> list[tuple]:
    pages, cursor = [], 0
    while True:
        *arrays, cursor = store.scan(table, cursor=cursor, max_rows=page, with_state=True)
        pages.append(arrays)
        if cursor == 0:
            filled = [each for each in pages if len(each[0])] or pages[:1]  # a table may have lost all rows
            return [np.concatenate([each[i] for each in filled]) for i in range(5)]


def fill(stores: tuple[_server.Store, ...], keys: np.ndarray, rng: np.random.Generator) -> None:
    for part in np.array_split(keys, max(1, len(keys) // 500)):
        rows = rng.standard_normal((len(part), DIM), np.float32)
        for store in stores:
            store.assign(1, part, rows)


def started_again(
    stores: tuple[_server.Store, ...], folder: Path, budget: int, options: dict[str, Any], lineage: int
) -> tuple[_server.Store, _server.Store]:
    fresh = make_stores(folder, budget, options, lineage)
    for store, old in zip(fresh, stores, strict=True):
        put_into(store, old)
    return fresh


def put_into(store: _server.Store, old: _server.Store) -> None:
    """As a shard that is started again takes a checkpoint: rows with state, and each slot's count of writes."""
    snapshot = old.snapshot()
    for table in TABLES:
        done = 0
        while done < SLOTS:
            *columns, _, done = snapshot.next(table, max_bytes=64 << 10)
            install_page(store, table, columns)
    versions = snapshot.slot_versions
    snapshot.end()
    go_on_from(store, versions)


def test_random_operations_equal_a_dict_and_a_store_in_memory(tmp_path, ssd_options):
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"seed {seed}: {OPERATIONS:,} operations, {ROWS:,} rows")
    rng = np.random.default_rng(seed)
    budget = max(ROWS * ROW_BYTES // 100, 192 << 10)  # 1 % of the rows; below 192 KiB the index alone is more
    budget += INDEX_BYTES[ssd_options["ssd_engine"]] * (
        ROWS + OPERATIONS // 10
    )  # of rows on the SSD, those that are created too
    tiered, plain = make_stores(tmp_path / "1", budget, ssd_options)
    keys_of_table = rng.integers(2**63, size=ROWS, dtype=np.uint64)
    fill((tiered, plain), keys_of_table, rng)
    counts: dict[int, dict[int, int]] = {1: dict.fromkeys(keys_of_table.tolist(), 0), 2: {}}
    done, refused, evicted, lineage = 0, 0, 0, 1
    restarts = np.sort(rng.integers(OPERATIONS, size=RESTARTS)).tolist()
    while done < OPERATIONS:
        while restarts and done >= restarts[0]:
            evicted += tiered.tier_stats()["rows_evicted"]
            lineage += 1
            tiered, plain = started_again((tiered, plain), tmp_path / str(lineage), budget, ssd_options, lineage)
            restarts.pop(0)
        table = 1 if rng.random() < 0.8 else 2
        size = int(rng.choice([1, 8, 60, 200]))
        pool = keys_of_table[: ROWS // 200] if rng.random() < 0.3 else keys_of_table
        keys = rng.choice(pool, size=size)
        fresh = rng.random(size) < 0.05
        keys[fresh] = rng.integers(2**63, size=int(fresh.sum()), dtype=np.uint64)
        done += size
        act = rng.random()
        if act < 0.45:
            dtype = "float32" if rng.random() < 0.8 else "bfloat16"
            assert_same(tiered.pull(table, keys, dtype=dtype), plain.pull(table, keys, dtype=dtype))
            found = tiered.pull(table, keys)[2]
            np.testing.assert_array_equal(found, [key in counts[table] for key in keys.tolist()])
        elif act < 0.88:
            grads = rng.standard_normal((size, DIM), np.float32)
            tiered.apply(table, keys, grads, lr=LR)
            plain.apply(table, keys, grads, lr=LR)
            for key in keys.tolist():
                counts[table][key] = counts[table].get(key, 0) + 1
        elif act < 0.92:
            rows = rng.standard_normal((size, DIM), np.float32)
            tiered.assign(table, keys, rows)
            plain.assign(table, keys, rows)
            for key in keys.tolist():
                counts[table].setdefault(key, 0)
        elif act < 0.95:
            gone = {key for key in keys.tolist() if counts[table].pop(key, None) is not None}
            assert tiered.erase(table, keys) == plain.erase(table, keys) == len(gone)
        elif act < 0.985:
            tiered.fetch_to_memory(table, keys)
        elif act < 0.99:
            tiered.write_back()
        elif act < 0.992:
            many = rng.integers(2**63, size=20_000, dtype=np.uint64)
            grads = np.ones((len(many), DIM), np.float32)
            with pytest.raises(ResourceExhausted):  # more at once than memory has room for
                tiered.apply(table, many, grads, lr=LR)
            refused += 1
        elif act < 0.9925:
            for store in (tiered, plain):
                store.drop_table(2)
                store.create_table(schema(2))
            counts[2] = {}
        assert tiered.used_bytes <= budget
    for table in TABLES:
        left, right = scan_all(tiered, table, 700), scan_all(plain, table, 5000)
        assert_same(tuple(left), tuple(right))
        check_versions(table, left[0], left[VERSIONS], last_versions(tiered))
        assert dict(zip(left[0].tolist(), left[2].tolist(), strict=True)) == counts[table]
    np.testing.assert_array_equal(last_versions(tiered), last_versions(plain))
    stats = tiered.tier_stats()
    assert stats is not None
    assert {s.table_id: s.rows for s in tiered.stats()} == {table: len(counts[table]) for table in TABLES}
    evicted += stats["rows_evicted"]
    assert evicted > OPERATIONS / 10
    print(f"evicted {evicted:,}, of the last start read {stats['ssd_rows_read']:,}, refused {refused} too large")


def test_a_restarted_store_begins_empty_in_its_own_folder(tmp_path, ssd_options):
    # Rows outlive a process by checkpoints only: what a folder holds is never taken for the rows of today.
    tiered, plain = make_stores(tmp_path, 256 << 10, ssd_options)
    keys = np.arange(5_000, dtype=np.uint64)
    fill((tiered, plain), keys, np.random.default_rng(1))
    assert tiered.stats()[0].ssd_rows > 0
    del tiered
    again, fresh = make_stores(tmp_path, 256 << 10, ssd_options)
    assert_same(again.pull(1, keys), fresh.pull(1, keys))
    assert not again.pull(1, keys)[2].any()
