"""A slot of 300 MB goes through a save, a scan and a follower in pages of at most 4 MiB, from memory and from the
SSD."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sparserow.cpp_ext import _server
from sparserow.proto.errors import error_of

DIM = 64
ROWS = 300_000_000 // (4 * DIM)
PAGE_BYTES = 4 << 20
SLOT, SLOTS, TABLE = 0, 2, 1
BATCH = 1 << 16


def make_store(folder: Path | None = None) -> _server.Store:
    _server.set_error_factory(error_of)
    tier = {"ssd_path": str(folder), "memory_budget_bytes": 96 << 20, "cluster_id": 5} if folder else {}
    store = _server.Store(slot_count=SLOTS, **tier)
    store.create_table(_server.TableSchema(id=TABLE, name="n/t", dim=DIM))
    return store


def keys_of_slot(count: int) -> NDArray[np.uint64]:
    keys = np.arange(3 * count, dtype=np.uint64)
    found = keys[_server.slots_of(TABLE, keys, SLOTS) == SLOT][:count]
    assert len(found) == count
    return found


def fill(store: _server.Store, keys: NDArray[np.uint64]) -> None:
    for batch in np.array_split(keys, max(1, len(keys) // BATCH)):
        store.assign(TABLE, batch, np.repeat(batch.astype(np.float32)[:, None], DIM, axis=1))


def is_equal(store: _server.Store, other: _server.Store, keys: NDArray[np.uint64]) -> bool:
    return all(
        np.array_equal(store.pull(TABLE, batch)[0], other.pull(TABLE, batch)[0]) for batch in np.array_split(keys, 32)
    )


def follow(source: _server.Store, target: _server.Store) -> int:
    """Takes all pages of one round; returns how many there were."""
    begin, pages = 0, 0
    while True:
        page, slots, begin, is_last = source.read_changes("follower", begin=begin, max_bytes=PAGE_BYTES)
        if slots == 0:
            return pages
        assert len(page) <= PAGE_BYTES
        applied = target.apply_changes(page)
        source.ack_changes("follower", applied["slots"], applied["positions"], applied["part"])
        pages += 1
        if is_last:
            return pages


@pytest.mark.parametrize("tiered", [False, True])
def test_a_slot_of_300_mb_goes_in_pages_of_4_mib(tmp_path: Path, tiered: bool) -> None:
    source = make_store(tmp_path if tiered else None)
    keys = keys_of_slot(ROWS)
    fill(source, keys)

    seen, cursor = 0, 0
    while True:
        found, *_, cursor = source.scan(TABLE, cursor=cursor, max_rows=PAGE_BYTES // (4 * DIM))
        seen += len(found)
        if cursor == 0:
            break
    assert seen == ROWS

    restored, snapshot, done = make_store(), source.snapshot(), 0
    source.apply(TABLE, keys[:1000], np.ones((1000, DIM), np.float32), lr=1.0)  # not in the snapshot
    while done < SLOTS:
        page = snapshot.next(TABLE, max_bytes=PAGE_BYTES)
        assert sum(column.nbytes for column in page[:5]) <= PAGE_BYTES
        restored.install(TABLE, *page[:5])
        done = page[8]
    snapshot.end()
    source.assign(TABLE, keys[:1000], np.repeat(keys[:1000].astype(np.float32)[:, None], DIM, axis=1))
    assert is_equal(source, restored, keys)
    del restored

    followed = make_store()
    source.open_cursor("follower", np.zeros(SLOTS, np.uint64), tables=[TABLE])
    pages = follow(source, followed)
    assert pages >= ROWS * 4 * DIM // PAGE_BYTES
    assert is_equal(source, followed, keys)
    gone, changed = keys[::2].copy(), keys[1::2].copy()
    source.erase(TABLE, gone)
    fill(source, changed)
    follow(source, followed)
    assert followed.stats()[0].rows == len(changed)
    assert is_equal(source, followed, keys)
