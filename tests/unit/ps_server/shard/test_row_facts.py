"""What a store says of one row: where it is, how often it was written, and when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparserow.cpp_ext import _server
from sparserow.proto.errors import NotFound, error_of

DIM, TABLE = 64, 1


def make_store(**options: object) -> _server.Store:
    _server.set_error_factory(error_of)
    store = _server.Store(slot_count=64, **options)
    store.create_table(_server.TableSchema(id=TABLE, name="n/t", dim=DIM))
    return store


def test_a_row_in_memory() -> None:
    store = make_store()
    keys = np.arange(100, dtype=np.uint64)
    assert not store.row_facts(TABLE, 5)["exists"]
    store.assign(TABLE, keys, np.ones((100, DIM), np.float32))
    facts = store.row_facts(TABLE, 5)
    assert (facts["exists"], facts["is_in_memory"], facts["age_ms"]) == (True, True, -1)  # nobody follows
    store.open_cursor("serving", store.change_versions())
    for _ in range(3):
        store.apply(TABLE, keys[:10], np.ones((10, DIM), np.float32), lr=0.1)
    changed = store.row_facts(TABLE, 5)
    assert changed["update_count"] - facts["update_count"] == 3
    assert changed["version"] > facts["version"]
    assert 0 <= changed["age_ms"] < 3_600_000
    assert store.row_facts(TABLE, 50)["age_ms"] == -1  # not written since somebody follows
    with pytest.raises(NotFound, match="table id 9"):
        store.row_facts(9, 5)


def test_rows_that_have_no_room_in_memory(tmp_path: Path) -> None:
    store = make_store(memory_budget_bytes=4 << 20, ssd_path=str(tmp_path), cluster_id=5)
    keys = np.arange(40_000, dtype=np.uint64)
    for part in np.array_split(keys, 20):
        store.assign(TABLE, part, np.repeat(part[:, None], DIM, axis=1).astype(np.float32))
    facts = [store.row_facts(TABLE, int(key)) for key in keys[::97]]
    assert all(row["exists"] and row["version"] for row in facts)
    assert {row["is_in_memory"] for row in facts} == {True, False}
    assert not store.row_facts(TABLE, 10**9)["exists"]
