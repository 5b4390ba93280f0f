"""``bench sweeps``: measures what the removal of rows costs pulls meanwhile.

Pulls arrive at half of the rate that a closed loop reaches, at times drawn beforehand, whether earlier pulls are done
or not. The latency of a pull counts from when it was due. They are made natively, because Python's threads would wait
for each other. Half of the rate is half of what pulls reach beside the work of the quiet spells.

Quiet spells take turns with spells in which a second thread sweeps the table without end, as a shard's sweeper does.
Before each such spell some rows are added that the policy no longer keeps. For a store that has an SSD, quiet spells
take turns with spells in which a second thread pushes rows that evict others from memory. Its quiet spells have the
same pushes, to rows that are in memory.

A percentile is the median over the spells. A machine that stops for 0.3 s once makes a queue of a hundredth of all
pulls, in whichever kind of spell that was. The p99 of all spells together is shown as well: 290 ms without sweeps and
1.2 ms with them in one run, 1.4 and 22.5 ms in the next.

The reference of sweeps is spells in which a second thread works and sleeps as a sweep does, and locks nothing. What
pulls lose beside it, they lose to the CPU, whatever is swept. Its longest slice shows how long this machine keeps a
thread from its CPU.

The longest lock of a stripe is shown twice. As elapsed time it includes the waits of the lock's owner for a CPU, which
another thread or another guest of the machine had. As CPU time of the owner it includes the system's work in its name
meanwhile, and on some machines the work of other guests.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _bench, _server
from ...ps_server.shard.table_sweeps import SWEEP_PAUSE_RATIO
from .harness import Figure, median

P99_LIMIT = 1.1
_SLICE_SEC = 1e-4  # seconds of a slice of a sweep (cpp_ext/store/store_sweep.cc)
HOLD_LIMIT_MS = 2.0
_TABLE = 1
_NORM = 1e-3

Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class SweepsSize:
    """The sizes of one run.

    Args:
        rows: the number of rows of the table, with ``dim`` float32 columns and Adagrad.
        dim: the number of columns.
        batch: the number of keys of a pull.
        unwanted: the number of rows that each sweep removes.
        spell_sec: the seconds of each spell.
        spells: the number of spells of each kind.
        share: the share of the table's memory that the store with an SSD may use.
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
        size: the sizes of the run; the full run takes about 2 GB of memory and 1 GB of disk.
        seed: the seed of keys and arrivals.
    """
    random = np.random.default_rng(seed)
    figures = _sweeping(size, random)
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

    def prepare() -> None:
        keys = np.arange(size.rows, size.rows + size.unwanted, dtype=np.uint64)
        store.assign(_TABLE, keys, zeros)

    def sweep() -> None:
        store.sweep(_TABLE, pause_ratio=SWEEP_PAUSE_RATIO)

    def rest() -> None:
        time.sleep(size.spell_sec / 10)

    spun: list[dict[str, float]] = []

    def spin() -> None:
        spun.append(_bench.spin_slices(size.spell_sec / 10, _SLICE_SEC, SWEEP_PAUSE_RATIO))

    draw = _uniform(random, size.rows, size.batch)
    shape = f"{size.batch:,} of {size.rows:,} x {size.dim}"
    spells = _Spells(rest, sweep, prepare, spin)
    figures = _compare(store, size, random, draw, spells, f"pull {shape}", "sweeps")
    longest, longest_cpu = (
        max(each[name] for each in spun) * 1e3 for name in ("longest_seconds", "longest_cpu_seconds")
    )
    stats = store.stats()[0]
    wall, cpu = stats.sweep_longest_hold_seconds * 1e3, stats.sweep_longest_hold_cpu_seconds * 1e3
    return [
        *figures,
        Figure("rows swept meanwhile", float(sum(stats.swept_rows)), "rows"),
        Figure("longest 0.1 ms slice of a thread that holds nothing", longest, "ms"),
        Figure("longest 0.1 ms slice of a thread that holds nothing, CPU time", longest_cpu, "ms"),
        Figure("longest hold of a stripe by a sweep", wall, "ms", HOLD_LIMIT_MS, None, False),
        Figure("longest hold of a stripe by a sweep, CPU time", cpu, "ms", HOLD_LIMIT_MS, None, False),
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
    for _ in range(max(20, 20 * hot // size.batch)):  # hot rows have to be in memory first
        store.apply(_TABLE, draw_hot(), grads, lr=0.01)

    def pushes(draw: Callable[[], Keys]) -> Callable[[], None]:
        def work() -> None:
            keys = np.unique(draw())
            store.apply(_TABLE, keys, grads[: len(keys)], lr=0.01)
            time.sleep(0.02)

        return work

    shape = f"{size.batch:,} hot of {size.rows:,} x {size.dim}"
    before = _written(store)
    spells = _Spells(pushes(draw_hot), pushes(draw_any))
    figures = _compare(store, size, random, draw_hot, spells, f"pull {shape}", "eviction")
    stats = store.tier_stats()
    assert stats is not None
    wall, cpu = stats["longest_hold_seconds"] * 1e3, stats["longest_hold_cpu_seconds"] * 1e3
    return [
        *figures,
        Figure("rows evicted meanwhile", float(_written(store) - before), "rows"),
        Figure("longest hold of a stripe by rows that leave or come back", wall, "ms", None, None, False),
        Figure("longest hold of a stripe by rows that leave or come back, CPU time", cpu, "ms", None, None, False),
    ]


def _written(store: _server.Store) -> int:
    stats = store.tier_stats()
    assert stats is not None
    return int(stats["ssd_rows_written"])


def _uniform(random: np.random.Generator, rows: int, count: int) -> Callable[[], Keys]:
    return lambda: random.integers(rows, size=count, dtype=np.uint64)


@dataclass(frozen=True)
class _Spells:
    """The work of a second thread in quiet and in busy spells, what is done before each spell, and the reference's
    work.
    """

    quiet: Callable[[], None]
    busy: Callable[[], None]
    prepare: Callable[[], None] = lambda: None
    reference: Callable[[], None] | None = None


def _compare(
    store: _server.Store,
    size: SweepsSize,
    random: np.random.Generator,
    draw: Callable[[], Keys],
    spells: _Spells,
    name: str,
    what: str,
) -> list[Figure]:
    """Returns p99 of pulls in quiet and in busy spells, and in the spells of the reference."""
    probes = 200
    keys = np.concatenate([draw() for _ in range(probes)])
    with _Beside(spells.quiet):
        _bench.open_loop_pulls(store, _TABLE, keys, np.zeros(probes))  # a warm-up, because the first pulls are slower
        begun = time.perf_counter()
        _bench.open_loop_pulls(store, _TABLE, keys, np.zeros(probes))
        interval = 2.0 * (time.perf_counter() - begun) / probes
    works = [spells.quiet, spells.busy, *([spells.reference] if spells.reference else [])]
    found: list[list[NDArray[np.float64]]] = [[] for _ in works]
    for _ in range(size.spells):
        for work, into in zip(works, found, strict=True):
            spells.prepare()
            due = np.cumsum(random.exponential(interval, size=int(size.spell_sec / interval)))
            keys = np.concatenate([draw() for _ in due])
            with _Beside(work):
                into.append(_bench.open_loop_pulls(store, _TABLE, keys, due))
    p50, p99 = ([median([float(np.percentile(spell, rank)) for spell in each]) for each in found] for rank in (50, 99))
    pooled = [float(np.percentile(np.concatenate(each), 99)) for each in found]
    samples = min(sum(map(len, each)) for each in found)
    figures = [
        Figure(f"{name}: p99 without {what} ({samples:,} samples)", p99[0] * 1e3, "ms"),
        Figure(f"{name}: p99 with {what}", p99[1] * 1e3, "ms", P99_LIMIT, p99[1] / p99[0], False),
        Figure(f"{name}: p50 with {what}", p50[1] * 1e3, "ms", None, p50[1] / p50[0], False),
        Figure(f"{name}: p99 of all spells together without {what}", pooled[0] * 1e3, "ms"),
        Figure(f"{name}: p99 of all spells together with {what}", pooled[1] * 1e3, "ms", None, None, False),
    ]
    if spells.reference:
        beside = f"{name}: p99 beside a thread that works as {what} do and holds nothing"
        figures.append(Figure(beside, p99[2] * 1e3, "ms", None, p99[2] / p99[0], False))
    return figures


class _Beside:
    """Repeats some work in a thread while the block runs; an error of the work is raised at the end of the block."""

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
