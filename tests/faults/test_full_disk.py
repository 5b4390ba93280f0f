"""A disk that is really full: steps are refused whole, what was acknowledged is there, and work goes on with room."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from small_disk import mounted_disk
from sparserow.cpp_ext import _server
from sparserow.proto.errors import ResourceExhausted, error_of

pytestmark = pytest.mark.started

DIM = 128
BATCH = 500


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    with mounted_disk(tmp_path / "disk", 16, "; ssd_bytes is tested in tests/cpp/tiering_test.cc") as folder:
        yield folder


def make_store(**options) -> _server.Store:
    store = _server.Store(slot_count=4, **options)
    store.create_table(
        _server.TableSchema(
            id=1,
            name="n/t",
            dim=DIM,
            init=_server.InitSpec(kind="uniform", a=-1.0, b=1.0),
            optimizer=_server.OptimizerSpec(kind="adam", eps=1e-8),
        )
    )
    return store


def assert_same(tiered: _server.Store, plain: _server.Store, keys: np.ndarray) -> None:
    """But for the order of versions: of one push, a row that waits for the SSD may get its own after the others."""
    (rows, versions, found), (plain_rows, plain_versions, plain_found) = tiered.pull(1, keys), plain.pull(1, keys)
    np.testing.assert_array_equal(rows, plain_rows)
    np.testing.assert_array_equal(found, plain_found)
    np.testing.assert_array_equal(np.sort(versions), np.sort(plain_versions))


def test_a_full_disk_loses_nothing_and_work_goes_on(small_disk: Path, ssd_engine: str) -> None:
    _server.set_error_factory(error_of)
    tiered = make_store(memory_budget_bytes=4 << 20, ssd_path=str(small_disk), ssd_engine=ssd_engine)
    plain = make_store()
    grads = np.ones((BATCH, DIM), np.float32)
    taken = 0
    refused = None
    while refused is None and taken < 4_000:
        keys = np.arange(taken * BATCH, (taken + 1) * BATCH, dtype=np.uint64)
        try:
            tiered.apply(1, keys, grads, lr=0.1)
        except ResourceExhausted as error:
            refused = error
        else:
            plain.apply(1, keys, grads, lr=0.1)
            taken += 1
    assert refused is not None
    assert "ssd_path" in str(refused)
    print(f"full after {taken * BATCH:,} rows: {refused}")
    every = np.arange((taken + 1) * BATCH, dtype=np.uint64)  # the refused ones too: they read as they did
    assert_same(tiered, plain, every)

    subprocess.run(["mount", "-o", "remount,size=700m", str(small_disk)], check=True)
    deadline = time.monotonic() + 60
    for part in np.array_split(every, taken + 1):
        while True:
            try:
                tiered.apply(1, part, grads[: len(part)], lr=0.1)
                break
            except ResourceExhausted:  # until the database has seen that there is room
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        plain.apply(1, part, grads[: len(part)], lr=0.1)
    assert_same(tiered, plain, every)
