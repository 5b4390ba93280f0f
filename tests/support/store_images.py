"""Rows of a snapshot put into another store, as a shard that is started again takes a checkpoint."""

from __future__ import annotations

import numpy as np

from sparserow.cpp_ext import _server

AT_ONCE = 200  # rows: what a small budget of memory has room for
SEQUENCE = np.uint64((1 << 48) - 1)  # of a version, below its lineage


def install_page(store: _server.Store, table: int, columns: tuple[np.ndarray, ...]) -> None:
    """columns: keys, versions, update counts, weights, state, as ``Snapshot.next`` gives them."""
    for part in np.array_split(np.arange(len(columns[0])), len(columns[0]) // AT_ONCE + 1):
        store.install(table, *(column[part] if len(column) else column for column in columns))


def go_on_from(store: _server.Store, slot_versions: np.ndarray) -> None:
    """Each slot counts its writes from where the snapshot's had got to."""
    store.set_sequences(np.arange(len(slot_versions), dtype=np.uint32), slot_versions & SEQUENCE)
