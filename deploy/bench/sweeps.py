"""``bench sweeps``: what removing rows costs those who pull meanwhile.

Pulls arrive at half of the rate that a closed loop reaches, at times drawn beforehand, whether earlier ones are done
or not; a pull's latency counts from when it was due. Quiet spells take turns with spells in which a second thread
sweeps the table without end (a share of its rows is wanted no more, and is made anew for each sweep), and, for a store
that has an SSD, with spells in which a second thread pushes rows that make others leave memory; its quiet spells have
the same pushes to rows that are in memory.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _server
from .harness import Figure

P99_LIMIT = 1.1
_TABLE = 1
_NORM = 1e-3

Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class SweepsSize:
    """Sizes of one run.

    Args:
        rows: of the table, of ``dim`` float32 columns with Adagrad.
        dim: columns.
        batch: keys of a pull.
        unwanted: rows of each sweep that it removes.
        spell_sec: seconds of each spell.
        spells: of each kind.
        share: of what the table takes in memory that the store with an SSD may take.
    """

    rows: int
    dim: int
    batch: int
    unwanted: int
    spell_sec: float
    spells: int
    share: float = 0.5


FULL = SweepsSize(rows=2_000_000, dim=32, batch=1_000, unwanted=20_000, spell_sec=1.0, spells=20)
QUICK = SweepsSize(rows=200_000, dim=16, batch=200, unwanted=500, spell_sec=0.1, spells=2)


def run_sweeps(size: SweepsSize, *, seed: int = 0) -> list[Figure]:
    """Measures p99 of pulls with and without sweeps, and with and without eviction.

    Args:
        size: of the run; the full one takes about 2 GB of memory and 1 GB of disk.
        seed: of keys and arrivals.
    """
    random = np.random.default_rng(seed)
    figures = _sweeping(size, random)
    if _server.has_ssd_tier():
        with tempfile.TemporaryDirectory() as folder:
            figures += _evicting(size, random, folder)
    return figures


def _schema(size: SweepsSize, **policy: float) -> _server.TableSchema:
    return _server.TableSchema(
        id=_TABLE,
        name="bench/sweeps",
        dim=size.dim,
        init=_server.InitSpec(kind="constant", a=1.0),
        optimizer=_server.OptimizerSpec(kind="adagrad"),
        policy=policy,
    )


def _fill(store: _server.Store, size: SweepsSize) -> None:
    for begin in range(0, size.rows, 8192):
        keys = np.arange(begin, min(begin + 8192, size.rows), dtype=np.uint64)
        store.assign(_TABLE, keys, np.ones((len(keys), size.dim), np.float32))


def _sweeping(size: SweepsSize, random: np.random.Generator) -> list[Figure]:
    store = _server.Store()
    store.create_table(_schema(size, evict_below_norm=_NORM))
    _fill(store, size)
    zeros = np.zeros((size.unwanted, size.dim), np.float32)

    def unwanted() -> None:
        keys = np.arange(size.rows, size.rows + size.unwanted, dtype=np.uint64)
        store.assign(_TABLE, keys, zeros)

    def sweep() -> None:
        unwanted()
        store.sweep(_TABLE)

    def pause() -> None:
        unwanted()
        time.sleep(size.spell_sec / 10)

    draw = _uniform(random, size.rows, size.batch)
    shape = f"{size.batch:,} of {size.rows:,} x {size.dim}"
    figures = _compare(store, size, random, draw, pause, sweep, f"pull {shape}", "sweeps")
    removed = store.stats()[0].swept_rows
    held = store.stats()[0].sweep_longest_hold_seconds
    return [
        *figures,
        Figure("rows swept meanwhile", float(sum(removed)), "rows"),
        Figure("longest hold of a stripe by a sweep", held * 1e3, "ms", 2.0, None, False),
    ]


def _evicting(size: SweepsSize, random: np.random.Generator, folder: str) -> list[Figure]:
    plain = _server.Store()
    plain.create_table(_schema(size))
    _fill(plain, size)
    budget = int(plain.used_bytes * size.share)
    del plain
    store = _server.Store(memory_budget_bytes=max(budget, 16 << 20), ssd_path=folder)
    store.create_table(_schema(size))
    _fill(store, size)
    hot = size.rows // 10
    grads = np.full((size.batch, size.dim), 0.1, np.float32)
    draw_hot = _uniform(random, hot, size.batch)
    draw_any = _uniform(random, size.rows, size.batch)
    for _ in range(max(20, 20 * hot // size.batch)):  # what is hot has to be in memory first
        store.apply(_TABLE, draw_hot(), grads, lr=0.01)

    def pushes(draw: Callable[[], Keys]) -> Callable[[], None]:
        def work() -> None:
            keys = np.unique(draw())
            store.apply(_TABLE, keys, grads[: len(keys)], lr=0.01)
            time.sleep(0.02)

        return work

    shape = f"{size.batch:,} hot of {size.rows:,} x {size.dim}"
    before = _written(store)
    figures = _compare(store, size, random, draw_hot, pushes(draw_hot), pushes(draw_any), f"pull {shape}", "eviction")
    return [*figures, Figure("rows evicted meanwhile", float(_written(store) - before), "rows")]


def _written(store: _server.Store) -> int:
    stats = store.tier_stats()
    assert stats is not None
    return int(stats["ssd_rows_written"])


def _uniform(random: np.random.Generator, rows: int, count: int) -> Callable[[], Keys]:
    return lambda: random.integers(rows, size=count, dtype=np.uint64)


def _compare(
    store: _server.Store,
    size: SweepsSize,
    random: np.random.Generator,
    draw: Callable[[], Keys],
    quiet: Callable[[], None],
    busy: Callable[[], None],
    name: str,
    what: str,
) -> list[Figure]:
    """p99 of pulls while another thread does ``quiet``, and while it does ``busy``."""
    out = np.zeros((size.batch, size.dim), np.float32)
    seconds = []
    for _ in range(200):
        keys = draw()
        started = time.perf_counter()
        store.pull_into(_TABLE, keys, out)
        seconds.append(time.perf_counter() - started)
    interval = 2.0 * float(np.mean(seconds))
    latencies: dict[Callable[[], None], list[float]] = {quiet: [], busy: []}
    for _ in range(size.spells):
        for work, into in latencies.items():
            with _Beside(work):
                into += _open_loop(store, draw, out, random, interval, size.spell_sec)
    p99 = {work: float(np.percentile(found, 99)) for work, found in latencies.items()}
    count = min(map(len, latencies.values()))
    return [
        Figure(f"{name}: p99 without {what} ({count:,} samples)", p99[quiet] * 1e3, "ms"),
        Figure(f"{name}: p99 with {what}", p99[busy] * 1e3, "ms", P99_LIMIT, p99[busy] / p99[quiet], False),
    ]


class _Beside:
    """Repeats some work in a thread while the block runs; an error of the work is raised at its end."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._stop = work, threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._work()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def _open_loop(
    store: _server.Store,
    draw: Callable[[], Keys],
    out: NDArray[np.float32],
    random: np.random.Generator,
    interval_sec: float,
    spell_sec: float,
) -> list[float]:
    """Latencies in seconds of pulls that are due at random times, ``interval_sec`` apart on average."""
    due = np.cumsum(random.exponential(interval_sec, size=int(spell_sec / interval_sec)))
    batches = [draw() for _ in due]
    latencies = []
    begin = time.perf_counter()
    for at, keys in zip(due + begin, batches, strict=True):
        while (left := at - time.perf_counter()) > 0:
            if left > 1e-3:
                time.sleep(left - 1e-3)
        store.pull_into(_TABLE, keys, out)
        latencies.append(time.perf_counter() - at)
    return latencies
