"""The first large batch of a store finds huge pages: it announces what it takes, so that none is touched by 4 KiB."""

from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest

from sparserow.cpp_ext import _server

ROWS, DIM = 50_000, 64
ROW_BYTES = 2 * DIM * 4
TABLE = 1
HUGE_PAGE = 2 << 20


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def system_gives_huge_pages() -> bool:
    with mmap.mmap(-1, 8 * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        before = faults()
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 1
        return faults() - before < len(memory) // mmap.PAGESIZE // 2


@pytest.mark.skipif(not system_gives_huge_pages(), reason="the system gives no huge pages")
def test_the_first_batch_of_a_store_takes_huge_pages() -> None:
    grads = np.ones((ROWS, DIM), np.float32)
    keys = np.arange(ROWS, dtype=np.uint64)
    store = _server.Store()
    store.create_table(
        _server.TableSchema(id=TABLE, name="t/rows", dim=DIM, optimizer=_server.OptimizerSpec(kind="adagrad"))
    )
    before = faults()
    store.apply(TABLE, keys, grads, lr=0.1)
    taken = faults() - before
    small_pages = ROWS * ROW_BYTES // mmap.PAGESIZE
    assert taken < small_pages / 8, f"{taken} faults for {ROWS * ROW_BYTES} bytes of rows"
