"""Rows that come to a table of ``sparserow bench engine``: births by push, overhead while a table grows, and restore.

- births: batches of new keys that fill the table, against the first touch of as many bytes of fresh memory after each
  batch. Where a machine's memory comes slowly, no store can create rows faster in one thread. The store's own thread,
  which touches pages ahead, is not pinned; it works while the fresh memory is touched, too.
- overhead: resident memory beyond weights and state per row, the largest over the steps of filling the table. The
  memory that has pages ahead of rows (``Store.reserved_bytes``) is apart.
- restore: rows installed in the order of slots, as files of rows have them, into memory that the process had before.
"""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from ...cpp_ext import _server
from .harness import Figure, median, resident_bytes

OVERHEAD_LIMIT_BYTES = 30.0
BIRTHS_LIMIT, BIRTHS_LIMIT_OF_TOUCH = 1.5, 0.8  # M rows/s, and of the first touch where that is slow
SLOW_TOUCH = 2.0  # M rows/s
LONGEST_BATCH_LIMIT = 2.5  # times the median batch
RESTORE_LIMIT = 3.0  # M rows/s
TABLE = 1
LR = 0.01
EPS = 1e-10
_RESTORE_BATCH = 16_384  # rows of 64 columns with Adagrad that a shard installs at once: 8 MiB
_SETTLE_SEC = 10.0


@dataclass(frozen=True)
class Filling:
    """What is created, and in which steps.

    Args:
        keys: the keys, (n,).
        dim: the number of float32 columns.
        step: the number of rows of a batch.
    """

    keys: NDArray[np.uint64]
    dim: int
    step: int

    @property
    def row_bytes(self) -> int:
        """The bytes of a row's weights and state."""
        return 2 * self.dim * 4

    @cached_property
    def grads(self) -> NDArray[np.float32]:
        """The gradients of a batch, (step, dim)."""
        return np.ones((self.step, self.dim), np.float32)

    def make_table(self, store: _server.Store) -> None:
        """Makes the empty table."""
        store.create_table(
            _server.TableSchema(
                id=TABLE,
                name="bench/engine",
                dim=self.dim,
                init=_server.InitSpec(kind="uniform", a=-0.05, b=0.05),
                optimizer=_server.OptimizerSpec(kind="adagrad", eps=EPS),
            )
        )

    def fill(self, store: _server.Store) -> Iterator[tuple[int, float]]:
        """Creates every row; yields after each batch the number of rows and the seconds that the batch took."""
        grads = self.grads
        batches = range(0, len(self.keys), self.step)
        for begin in track(batches, f"fill a table of dim {self.dim}", transient=True, console=Console(stderr=True)):
            part = self.keys[begin : begin + self.step]
            started = time.perf_counter()
            store.apply(TABLE, part, grads[: len(part)], lr=LR)
            yield begin + len(part), time.perf_counter() - started


@dataclass
class _Seconds:
    births: list[float] = field(default_factory=list)
    touches: list[float] = field(default_factory=list)


def births_figures(store: _server.Store, filling: Filling) -> list[Figure]:
    """Fills the table and returns the figures of births, with those of the first touch of as many bytes."""
    filling.make_table(store)
    fresh = np.empty(len(filling.keys) * filling.row_bytes, np.uint8)  # its pages come when they are touched
    seconds, done = _Seconds(), 0
    for rows, took in filling.fill(store):
        seconds.births.append(took)
        started = time.perf_counter()
        fresh[done * filling.row_bytes : rows * filling.row_bytes : mmap.PAGESIZE] = 1
        seconds.touches.append(time.perf_counter() - started)
        done = rows
    births, touch = (1e-6 * filling.step / median(each) for each in (seconds.births, seconds.touches))
    is_slow = touch < SLOW_TOUCH
    limit, ratio = (BIRTHS_LIMIT_OF_TOUCH, births / touch) if is_slow else (BIRTHS_LIMIT, None)
    longest = max(seconds.births) / median(seconds.births)
    return [
        Figure("births by push", births, "M rows/s", limit, ratio),
        Figure("reference of births: first touch of as many bytes", touch, "M rows/s"),
        Figure("longest batch of births", longest, "x median", LONGEST_BATCH_LIMIT, None, False),
    ]


def overhead_figures(store: _server.Store, filling: Filling) -> list[Figure]:
    """Fills a table of a new store, and returns the figures of memory beyond weights and state."""
    # The gradients, and what a first push to another table allocates once, are part of the baseline.
    grads = filling.grads
    store.create_table(_server.TableSchema(id=TABLE + 1, name="bench/warm", dim=1))
    warm = filling.keys[: filling.step]
    store.apply(TABLE + 1, warm, np.ascontiguousarray(grads[: len(warm), :1]), lr=0.0)
    store.drop_table(TABLE + 1)
    filling.make_table(store)
    gc.collect()
    resident, reserved = _settled(store)
    base = resident - reserved
    worst, beside = 0.0, 0.0
    for rows, _ in filling.fill(store):
        if rows < len(filling.keys) // 16:  # with fewer rows, the page size of the arenas dominates
            continue
        resident, reserved = _settled(store)
        overhead = (resident - reserved - base) / rows - filling.row_bytes
        if overhead > worst:
            worst, beside = overhead, reserved / rows
    return [
        Figure("overhead per row, worst while filling", worst, "bytes/row", OVERHEAD_LIMIT_BYTES, None, False),
        Figure("memory with pages ahead of rows, at the worst overhead", beside, "bytes/row"),
    ]


def restore_figures(store: _server.Store, filling: Filling) -> list[Figure]:
    """Installs the table's rows in the order of slots, twice, and returns the figure of the second time."""
    filling.make_table(store)
    for _ in filling.fill(store):
        pass
    keys = np.concatenate(list(_scanned_keys(store)))
    weights = np.ones((_RESTORE_BATCH, filling.dim), np.float32)
    seconds: list[float] = []
    for _ in range(2):
        store.drop_table(TABLE)
        filling.make_table(store)
        seconds.clear()
        for begin in range(0, len(keys), _RESTORE_BATCH):
            part = keys[begin : begin + _RESTORE_BATCH]
            count = len(part)
            versions, updates = np.full(count, 1 << 48, np.uint64), np.ones(count, np.uint32)
            started = time.perf_counter()
            store.install(TABLE, part, versions, updates, weights[:count].view(np.uint8), weights[:count])
            seconds.append(time.perf_counter() - started)
    return [
        Figure(
            "restore of rows in the order of slots, warm memory",
            1e-6 * len(keys) / sum(seconds),
            "M rows/s",
            RESTORE_LIMIT,
        )
    ]


def _scanned_keys(store: _server.Store) -> Iterator[NDArray[np.uint64]]:
    cursor = 0
    while True:
        page = store.scan(TABLE, cursor=cursor)
        yield page[0]
        cursor = page[-1]
        if cursor == 0:
            return


def _settled(store: _server.Store) -> tuple[int, int]:
    """Returns resident and reserved bytes of one moment at which no page is touched ahead."""
    deadline = time.monotonic() + _SETTLE_SEC
    while True:
        before = store.reserved_bytes
        resident = resident_bytes()
        is_quiet = not store.is_reserve_filling and before == store.reserved_bytes
        if is_quiet or time.monotonic() > deadline:
            return resident, before
        time.sleep(0.001)
