"""A snapshot is the store of its instant, whatever is written while it is handed out: random operations, in memory and
with a hundredth of the rows there, at once and page by page; and put into another store it is that store again."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from long_form import FULL
from sparserow.cpp_ext import _server
from sparserow.proto.errors import error_of
from store_images import go_on_from, install_page

ROUNDS = 60 if FULL else 4
ROWS = 30_000 if FULL else 8_000
DIM = 8
SLOTS = 4  # so that a budget of one row in some dozens is possible: each slot has memory of its own
TABLES = (1, 2)
COLUMNS = ("keys", "versions", "update_counts", "weights", "state")


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


def make_store(folder, *, engine: str | None, lineage: int = 1) -> _server.Store:
    _server.set_error_factory(error_of)
    folder.mkdir(exist_ok=True)
    options = {} if engine is None else {"ssd_path": str(folder), "ssd_engine": engine}
    if engine is not None:
        index = 13 * ROWS * len(TABLES) if engine == "pages" else 0  # bytes of it in the budget
        options["memory_budget_bytes"] = (192 << 10) + index
    store = _server.Store(slot_count=SLOTS, lineage=lineage, cluster_id=9, shard=3, **options)
    for table in TABLES:
        store.create_table(schema(table))
    return store


def write(store: _server.Store, rng: np.random.Generator) -> None:
    """One random write of one table."""
    table = int(rng.choice(TABLES))
    keys = rng.choice(ROWS, size=int(rng.choice([1, 20, 300])), replace=False).astype(np.uint64)
    kind = rng.random()
    if kind < 0.2:
        store.erase(table, keys)
    elif kind < 0.3:
        store.assign(table, keys, rng.standard_normal((len(keys), DIM), np.float32))
    else:
        store.apply(table, keys, rng.standard_normal((len(keys), DIM), np.float32), lr=0.1)


def rows_of(store: _server.Store, table: int) -> dict[int, tuple]:
    found, cursor = {}, 0
    while True:
        keys, versions, counts, rows, state, cursor = store.scan(table, cursor=cursor, max_rows=5000, with_state=True)
        for i, key in enumerate(keys.tolist()):
            found[key] = (int(versions[i]), int(counts[i]), rows[i].tobytes(), state[i].tobytes())
        if cursor == 0:
            return found


def as_float32(weights: np.ndarray) -> np.ndarray:
    return weights if weights.dtype == np.float32 else (weights.astype(np.uint32) << 16).view(np.float32)


def dumped(snapshot, table: int, between=lambda: None, max_bytes: int = 64 << 10) -> list[tuple]:
    pages, done = [], 0
    while done < SLOTS:
        *columns, first, end = snapshot.next_images(table, max_bytes=max_bytes)
        assert (first, end) == (done, SLOTS)
        if len(columns[0]):
            pages.append((*columns, end))
            between()
        *columns, first, end = snapshot.next(table, max_bytes=max_bytes)
        assert first == done
        done = end
        pages.append((*columns, end))
        between()
    return pages


def content(pages: list[tuple]) -> dict[int, tuple]:
    found = {}
    for keys, versions, counts, weights, state, *_ in pages:
        rows = as_float32(weights)
        for i, key in enumerate(keys.tolist()):
            assert key not in found
            found[key] = (int(versions[i]), int(counts[i]), rows[i].tobytes(), state[i].tobytes())
    return found


@pytest.mark.parametrize("engine", [None, "pages", "rocksdb"])
def test_a_snapshot_is_its_instant_and_becomes_the_store_again(tmp_path, engine):
    if engine == "rocksdb" and not _server.has_rocksdb():
        pytest.skip("this build has no RocksDB")
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    store = make_store(tmp_path / "a", engine=engine)
    for _ in range(60):
        write(store, rng)
    for number in range(ROUNDS):
        for _ in range(40):
            write(store, rng)
        expected = {table: rows_of(store, table) for table in TABLES}
        snapshot = store.snapshot(side_budget_bytes=64 << 20)
        pages = {}
        for table in TABLES:
            pages[table] = dumped(snapshot, table, lambda: [write(store, rng) for _ in range(3)])
            assert content(pages[table]) == expected[table]
        assert snapshot.stats()["rows_saved"] > 0
        versions = snapshot.slot_versions
        snapshot.end()

        again = make_store(tmp_path / f"b{number}", engine=engine, lineage=2)
        for table in TABLES:
            for page in pages[table]:
                install_page(again, table, page[:-1])
        go_on_from(again, versions)
        assert {table: rows_of(again, table) for table in TABLES} == expected
        key = np.array([ROWS + number], np.uint64)
        again.apply(1, key, np.ones((1, DIM), np.float32), lr=0.1)
        _, version, _ = again.pull(1, key)
        slot = _server.slot_of(_server.row_hash(1, int(key[0])), SLOTS)
        assert version[0] == (2 << 48 | int(versions[slot]) & ((1 << 48) - 1)) + 1


def test_images_leave_before_their_turn_and_nobody_waits_for_room(tmp_path):
    """Every row changes several times during the dump, in a side buffer that has room for half of them."""
    store = make_store(tmp_path / "a", engine=None)
    keys, rng = np.arange(4000, dtype=np.uint64), np.random.default_rng(11)
    store.apply(1, keys, rng.standard_normal((len(keys), DIM), np.float32), lr=0.1)
    expected = rows_of(store, 1)
    budget = len(keys) // 2 * (4 * 2 * DIM + 64)
    snapshot = store.snapshot(side_budget_bytes=budget)
    batches = iter(np.array_split(np.tile(rng.permutation(keys), 3), 40))

    def push() -> None:
        if (some := next(batches, None)) is not None:
            store.apply(1, some, np.ones((len(some), DIM), np.float32), lr=0.1)

    pages, done = [], 0
    while done < SLOTS:
        for _ in range(6):
            push()
            *columns, _, end = snapshot.next_images(1, max_bytes=1 << 30)
            pages.append((*columns, end))
        *columns, _, done = snapshot.next(1, max_bytes=1)
        pages.append((*columns, done))
    stats = snapshot.stats()
    snapshot.end()
    assert content(pages) == expected
    assert stats["rows_saved"] > len(keys) // 2, "more than there was room for at once"
    assert stats["writes_stalled"] == 0
    assert stats["side_bytes_most"] < budget


def test_a_save_gives_its_memory_back_and_takes_no_more_than_its_budget():
    """Every row changes while the snapshot is held, and pages are kept as by a dump that writes one of them."""
    _server.set_error_factory(error_of)
    store = _server.Store(slot_count=1024)
    store.create_table(schema(1))
    keys, budget = np.arange(400_000, dtype=np.uint64), 64 << 20
    grads = np.ones((len(keys), DIM), np.float32)
    store.apply(1, keys, grads, lr=0.1)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def save() -> int:
        snapshot, done, most, pages = store.snapshot(side_budget_bytes=budget), 0, 0, []
        with ThreadPoolExecutor(2) as writers:
            list(writers.map(lambda some: store.apply(1, some, grads[: len(some)], lr=0.1), np.array_split(keys, 200)))
        while done < 1024:
            pages = [*pages[-1:], snapshot.next_images(1, max_bytes=snapshot.page_bytes(32 << 20))]
            if not len(pages[-1][0]):
                pages[-1] = snapshot.next(1, max_bytes=snapshot.page_bytes(32 << 20))
                done = pages[-1][-1]
            most = max(most, resident())
        assert snapshot.stats()["rows_saved"] == len(keys)
        return most

    before = resident()
    assert save() < before + budget
    assert resident() < before + budget // 8


def test_a_page_is_a_sixteenth_of_the_side_budget(tmp_path):
    store = make_store(tmp_path / "a", engine=None)
    for budget, most, expected in ((128, 32, 8), (1024, 32, 32), (1, 32, 4), (1, 2, 2)):
        snapshot = store.snapshot(side_budget_bytes=budget << 20)
        assert snapshot.page_bytes(most << 20) == expected << 20
        snapshot.end()


def test_a_delta_is_what_changed_since(tmp_path):
    rng = np.random.default_rng(7)
    store = make_store(tmp_path / "a", engine=None)
    for _ in range(40):
        write(store, rng)
    before = rows_of(store, 1)
    base = store.snapshot()
    since = base.slot_versions
    base.end()
    keys = np.arange(50, dtype=np.uint64)
    store.apply(1, keys, np.ones((50, DIM), np.float32), lr=0.1)
    delta = store.snapshot(since=since)
    changed = content(dumped(delta, 1))
    assert set(changed) == set(range(50))
    assert content(dumped(delta, 2)) == {}
    assert {**before, **changed} == rows_of(store, 1)
    assert not delta.whole_slots.any()
    delta.end()

    gone = np.array([min(before)], np.uint64)
    assert store.erase(1, gone) == 1
    delta = store.snapshot(since=since)
    slot = int(_server.slots_of(1, gone, SLOTS)[0])
    assert delta.whole_slots.nonzero()[0].tolist() == [slot]
    changed = content(dumped(delta, 1))
    keys = np.array(sorted(before), np.uint64)
    kept = {
        key: before[key] for key, at in zip(keys.tolist(), _server.slots_of(1, keys, SLOTS), strict=True) if at != slot
    }
    assert {**kept, **changed} == rows_of(store, 1)
    delta.end()
    store.drop_table(2)
    assert store.snapshot(since=since).whole_slots.all()


def test_ages_and_filters_of_the_instant_are_kept(tmp_path):
    """What changes after the cut is not in it; put back, a sweep and an admission go on as they would have."""

    def made() -> _server.Store:
        store = _server.Store(slot_count=SLOTS)
        policy = {"admit_after": 2, "evict_after_steps": 3, "evict_after_seconds": 10**6}
        store.create_table(_server.TableSchema(id=1, name="n/t", dim=DIM, policy=policy))
        return store

    def push(store: _server.Store, keys: range, step: int) -> None:
        grads = np.ones((len(keys), DIM), np.float32)
        store.apply(1, np.array(keys, np.uint64), grads, lr=0.1, job=1, step=step)

    store = made()
    for step, keys in enumerate((range(100), range(100), range(50), range(100, 130))):
        push(store, keys, step)
    snapshot = store.snapshot()
    push(store, range(200), 4)
    [page] = dumped(snapshot, 1, max_bytes=1 << 30)
    keys, *_, age_steps, push_seconds, _ = page
    assert dict(zip(keys.tolist(), age_steps.tolist(), strict=True)) == {k: 1 if k < 50 else 2 for k in range(100)}
    assert len(push_seconds) == 100
    again = made()
    again.install(1, *page[:-1])
    for slot in range(SLOTS):
        again.load_filter(1, slot, snapshot.filter_image(1, slot))
    snapshot.end()
    assert again.stats()[0].filter_entries == 30
    push(again, range(100, 131), 9)
    assert again.stats()[0].rows == 130  # the keys that were counted once have their rows, and 130 has not
    report = again.sweep(1)
    assert [freed.rows for freed in report.freed] == [50, 0, 0, 0]
