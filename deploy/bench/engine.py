"""``sparserow bench engine``: measures the store alone against plain arrays, in one thread pinned to one CPU.

- pull: ``Store.pull`` of unique random keys, against ``torch.index_select`` on a plain matrix of the table's size,
  both into an existing buffer. Where keys are drawn between two measurements, the draw without replacement goes
  through the caches, so that the index of rows is read from memory; keys that are drawn before all measurements leave
  it where training finds it.
- push: ``Store.apply`` with Adagrad, against a C++ loop with prefetching that does Adagrad in place on flat arrays
  of the same size (``cpp_ext/bindings/server_reference.h``), with keys drawn the same way and the same gradients.
- births: batches of new keys that fill the table, against the first touch of as many bytes of fresh memory after each
  batch. Where a machine's memory comes slowly, no store can create rows faster.
- overhead: resident memory beyond weights and state per row, the largest over the steps of filling the table.
"""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from ...cpp_ext import _server
from .harness import MIN_REPETITIONS, Contender, Figure, median, pinned_to_one_cpu, resident_bytes, time_in_turns

PULL_LIMITS = {64: 0.8, 16: 0.55, 8: 0.55}
COLD_PULL_LIMIT = 0.6
PUSH_LIMIT = 0.9
OVERHEAD_LIMIT_BYTES = 32.0
BIRTHS_LIMIT, BIRTHS_LIMIT_OF_TOUCH = 1.5, 0.8  # M rows/s, and of the first touch where that is slow
SLOW_TOUCH = 2.0  # M rows/s
LONGEST_BATCH_LIMIT = 2.5  # times the median batch
_TABLE = 1
_LR = 0.01
_EPS = 1e-10


@dataclass(frozen=True)
class EngineSize:
    """The sizes of one run.

    Args:
        rows: the number of rows of the table.
        dim: the number of float32 columns.
        narrow_dims: the dims of further tables of as many rows, which are pulled only.
        batch: the number of unique keys of a pull or push.
        fill_step: the number of rows created between two readings of resident memory.
        repetitions: the number of repetitions of each measurement.
    """

    rows: int
    dim: int
    narrow_dims: tuple[int, ...]
    batch: int
    fill_step: int
    repetitions: int

    def shape(self, dim: int) -> str:
        """Returns the sizes in the form that names of figures have."""
        return f"{self.batch:,} of {self.rows:,} x {dim}"


FULL = EngineSize(rows=8_000_000, dim=64, narrow_dims=(16, 8), batch=50_000, fill_step=50_000, repetitions=60)
QUICK = EngineSize(rows=200_000, dim=64, narrow_dims=(16,), batch=5_000, fill_step=10_000, repetitions=MIN_REPETITIONS)


def run_engine(size: EngineSize, *, seed: int = 0) -> list[Figure]:
    """Measures the store.

    Args:
        size: the sizes of the run; the full run takes about 9 GiB.
        seed: the seed of keys and gradients.

    Returns:
        The figures of overhead, pulls and pushes.
    """
    random = np.random.default_rng(seed)
    keys = (np.arange(size.rows, dtype=np.uint64) << np.uint64(16)) | np.uint64(random.integers(2**16))
    random.shuffle(keys)
    with pinned_to_one_cpu():
        store = _server.Store()
        figures = _fill(store, keys, size, size.dim).figures(size.fill_step)
        draw = _Draw(keys, size.batch, random)
        figures += _pull_figures(store, draw, size, size.dim, is_cold=True)
        figures += _pull_figures(store, draw, size, size.dim)
        figures += _push_figures(store, draw, size, random)
        del store
        for dim in size.narrow_dims:
            narrow = _server.Store()
            _fill(narrow, keys, size, dim)
            figures += _pull_figures(narrow, draw, size, dim)
    return figures


@dataclass
class _Filling:
    """What was measured while a table was filled.

    Attributes:
        overhead: the worst overhead, in bytes per row.
        births: the seconds of each batch.
        touches: the seconds of the first touch of as many bytes as a batch's rows take, after each batch.
    """

    overhead: float = 0.0
    births: list[float] = field(default_factory=list)
    touches: list[float] = field(default_factory=list)

    def figures(self, rows: int) -> list[Figure]:
        """Returns the figures of batches of so many rows."""
        births, touch = (1e-6 * rows / median(seconds) for seconds in (self.births, self.touches))
        is_slow = touch < SLOW_TOUCH
        limit, ratio = (BIRTHS_LIMIT_OF_TOUCH, births / touch) if is_slow else (BIRTHS_LIMIT, None)
        longest = max(self.births) / median(self.births)
        return [
            Figure(
                "overhead per row, worst while filling", self.overhead, "bytes/row", OVERHEAD_LIMIT_BYTES, None, False
            ),
            Figure("births by push", births, "M rows/s", limit, ratio),
            Figure("reference of births: first touch of as many bytes", touch, "M rows/s"),
            Figure("longest batch of births", longest, "x median", LONGEST_BATCH_LIMIT, None, False),
        ]


def _fill(store: _server.Store, keys: NDArray[np.uint64], size: EngineSize, dim: int) -> _Filling:
    """Creates every row."""
    store.create_table(
        _server.TableSchema(
            id=_TABLE,
            name="bench/engine",
            dim=dim,
            init=_server.InitSpec(kind="uniform", a=-0.05, b=0.05),
            optimizer=_server.OptimizerSpec(kind="adagrad", eps=_EPS),
        )
    )
    grads = np.ones((size.fill_step, dim), np.float32)
    # A first push to another table allocates what a process needs once, so that the baseline includes it.
    store.create_table(_server.TableSchema(id=_TABLE + 1, name="bench/warm", dim=1))
    store.apply(_TABLE + 1, keys[: size.fill_step], np.ones((size.fill_step, 1), np.float32), lr=0.0)
    store.drop_table(_TABLE + 1)
    gc.collect()
    base = resident_bytes()
    row_bytes = 2 * dim * 4
    fresh = np.empty(len(keys) * row_bytes, np.uint8)  # its pages come when they are touched
    filling, touched = _Filling(), 0
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"fill a table of dim {dim}", total=len(keys))
        for begin in range(0, len(keys), size.fill_step):
            part = keys[begin : begin + size.fill_step]
            rows = begin + len(part)
            started = time.perf_counter()
            store.apply(_TABLE, part, grads[: len(part)], lr=_LR)
            ended = time.perf_counter()
            filling.births.append(ended - started)
            if rows >= size.rows // 16:  # with fewer rows, the page size of the arenas dominates
                beyond = resident_bytes() - base - touched - rows * row_bytes
                filling.overhead = max(filling.overhead, beyond / rows)
            before, started = resident_bytes(), time.perf_counter()
            fresh[begin * row_bytes : rows * row_bytes : mmap.PAGESIZE] = 1
            filling.touches.append(time.perf_counter() - started)
            touched += resident_bytes() - before
            progress.advance(task, len(part))
    return filling


class _Draw:
    """Draws unique random rows of the table, and their keys, in one order; a batch is never drawn twice."""

    def __init__(self, keys: NDArray[np.uint64], batch: int, random: np.random.Generator) -> None:
        self._keys, self._batch, self._random = keys, batch, random
        self._drawn: list[NDArray[np.int64]] = []

    def rows(self) -> NDArray[np.int64]:
        return self._random.choice(len(self._keys), size=self._batch, replace=False)

    def keys(self) -> NDArray[np.uint64]:
        return self._keys[self.rows()]

    def before(self, batches: int) -> tuple[Callable[[], NDArray[np.uint64]], Callable[[], NDArray[np.int64]]]:
        """Draws so many batches, if it has not yet; returns what gives the next one's keys, and what gives its rows."""
        self._drawn += [self.rows() for _ in range(batches - len(self._drawn))]
        keys = [self._keys[each] for each in self._drawn]
        return cycle(keys).__next__, cycle(self._drawn).__next__


def _pull_figures(
    store: _server.Store, draw: _Draw, size: EngineSize, dim: int, *, is_cold: bool = False
) -> list[Figure]:
    """Returns the figures of pulls of one table; ``is_cold``: keys are drawn between two measurements."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.ones(size.rows, dim)
    matrix_out = torch.zeros(size.batch, dim)
    rows_out = np.zeros((size.batch, dim), np.float32)
    draw_keys, draw_rows = (draw.keys, draw.rows) if is_cold else draw.before(2 * size.repetitions)
    seconds = time_in_turns(
        [
            Contender("pull", draw_keys, lambda keys: store.pull_into(_TABLE, keys, rows_out)),
            Contender(
                "index_select",
                lambda: torch.from_numpy(draw_rows()),
                lambda rows: torch.index_select(matrix, 0, rows, out=matrix_out),
            ),
        ],
        repetitions=size.repetitions,
    )
    ours, plain = (size.batch / median(each) / 1e6 for each in seconds)
    drawn = "keys drawn between" if is_cold else "keys drawn before"
    limit = COLD_PULL_LIMIT if is_cold else PULL_LIMITS[dim]
    return [
        Figure(f"pull {size.shape(dim)}, {drawn}", ours, "M rows/s", limit, ours / plain),
        Figure(f"reference of it: torch.index_select on a plain matrix x {dim}, {drawn}", plain, "M rows/s"),
    ]


def _push_figures(store: _server.Store, draw: _Draw, size: EngineSize, random: np.random.Generator) -> list[Figure]:
    import torch

    weights, sums = torch.ones(size.rows, size.dim).numpy(), torch.ones(size.rows, size.dim).numpy()
    grads = random.standard_normal((size.batch, size.dim), np.float32)
    seconds = time_in_turns(
        [
            Contender("push", draw.keys, lambda keys: store.apply(_TABLE, keys, grads, lr=_LR)),
            Contender(
                "flat Adagrad",
                draw.rows,
                lambda rows: _server.flat_adagrad(rows, grads, weights, sums, lr=_LR, eps=_EPS),
            ),
        ],
        repetitions=size.repetitions,
    )
    ours, plain = (size.batch / median(each) / 1e6 for each in seconds)
    return [
        Figure(f"Adagrad push {size.shape(size.dim)}", ours, "M rows/s", PUSH_LIMIT, ours / plain),
        Figure("reference of push: Adagrad in place on flat arrays", plain, "M rows/s"),
    ]
