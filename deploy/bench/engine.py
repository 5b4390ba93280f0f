"""``sparserow bench engine``: measures the store alone against plain arrays, in one thread pinned to one CPU.

- pull: ``Store.pull`` of unique random keys, against ``torch.index_select`` on a plain matrix of the table's size,
  both into an existing buffer. Where keys are drawn between two measurements, the draw without replacement goes
  through the caches, so that the index of rows is read from memory; keys that are drawn before all measurements leave
  it where training finds it. Also of small tables, whose rows the caches have in part.
- push: ``Store.apply`` with Adagrad, against a C++ loop with prefetching that does Adagrad in place on flat arrays
  of the same size (``cpp_ext/bindings/bench_flat_adagrad.cc``), with keys drawn the same way and the same gradients.
- births, overhead and restore: ``engine_filling.py``.
- several threads, each on a core of its own: ``engine_cores.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _bench, _server
from .engine_cores import CORES, cores_figures, cores_of_machine
from .engine_filling import EPS, LR, TABLE, Filling, births_figures, overhead_figures, restore_figures
from .harness import MIN_REPETITIONS, Contender, Figure, median, pinned_to_one_cpu, time_in_turns

PULL_LIMITS = {64: 0.8, 16: 0.55, 8: 0.55}
COLD_PULL_LIMIT = 0.6
SMALL_PULL_LIMIT = 0.6
PUSH_LIMIT = 0.9


@dataclass(frozen=True)
class EngineSize:
    """The sizes of one run.

    Args:
        rows: the number of rows of the table.
        dim: the number of float32 columns.
        narrow_dims: the dims of further tables of as many rows, which are pulled only.
        small: the numbers of rows of small tables, which are pulled only, one of each dim.
        batch: the number of unique keys of a pull or push.
        fill_step: the number of rows created between two readings of resident memory.
        repetitions: the number of repetitions of each measurement.
    """

    rows: int
    dim: int
    narrow_dims: tuple[int, ...]
    small: tuple[int, ...]
    batch: int
    fill_step: int
    repetitions: int

    def shape(self, dim: int) -> str:
        """Returns the sizes in the form that names of figures have."""
        return f"{self.batch:,} of {self.rows:,} x {dim}"


FULL = EngineSize(
    rows=8_000_000,
    dim=64,
    narrow_dims=(16, 8),
    small=(100_000, 500_000),
    batch=50_000,
    fill_step=50_000,
    repetitions=60,
)
QUICK = EngineSize(
    rows=200_000, dim=64, narrow_dims=(16,), small=(10_000,), batch=5_000, fill_step=10_000, repetitions=MIN_REPETITIONS
)


def run_engine(size: EngineSize, *, seed: int = 0) -> list[Figure]:
    """Measures the store.

    Args:
        size: the sizes of the run; the full run takes about 9 GiB.
        seed: the seed of keys and gradients.

    Returns:
        The figures of births, pulls, pushes, overhead and restore.
    """
    random = np.random.default_rng(seed)
    keys = (np.arange(size.rows, dtype=np.uint64) << np.uint64(16)) | np.uint64(random.integers(2**16))
    random.shuffle(keys)
    filling = Filling(keys, size.dim, size.fill_step)
    store = _server.Store()  # before this thread is pinned: the store's own thread is not
    small_shapes = [(rows, dim) for rows in size.small for dim in (size.dim, *size.narrow_dims)]
    shapes = [*small_shapes, *((size.rows, dim) for dim in size.narrow_dims)]
    pulled_stores = {shape: _server.Store() for shape in shapes}
    cores = cores_of_machine()
    with pinned_to_one_cpu():
        figures = births_figures(store, filling)
        draws = {rows: _Draw(keys[:rows], size.batch, random) for rows in (*size.small, size.rows)}
        draw = draws[size.rows]
        figures += _pull_figures(store, draw, size, size.dim, COLD_PULL_LIMIT, is_cold=True)
        figures += _pull_figures(store, draw, size, size.dim, PULL_LIMITS[size.dim])
        figures += _push_figures(store, draw, size, random)
        if len(cores) >= CORES:
            figures += cores_figures(store, keys, size.dim, size.batch, cores[:CORES])
        del store
        for rows, dim in shapes:
            pulled = pulled_stores.pop((rows, dim))
            pulled_filling = Filling(keys[:rows], dim, size.fill_step)
            pulled_filling.make_table(pulled)
            for _ in pulled_filling.fill(pulled):
                pass
            limit = PULL_LIMITS[dim] if rows == size.rows else SMALL_PULL_LIMIT
            figures += _pull_figures(pulled, draws[rows], replace(size, rows=rows), dim, limit)
            del pulled
    for more in (overhead_figures, restore_figures):
        store = _server.Store()
        with pinned_to_one_cpu():
            figures += more(store, filling)
        del store
    return figures


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
    store: _server.Store, draw: _Draw, size: EngineSize, dim: int, limit: float, *, is_cold: bool = False
) -> list[Figure]:
    """Returns the figures of pulls of one table; ``is_cold``: keys are drawn between two measurements."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.ones(size.rows, dim)
    matrix_out = torch.zeros(size.batch, dim)
    rows_out = torch.zeros(size.batch, dim).numpy()  # begins at a cache line, as the reference's does
    draw_keys, draw_rows = (draw.keys, draw.rows) if is_cold else draw.before(2 * size.repetitions)
    seconds = time_in_turns(
        [
            Contender("pull", draw_keys, lambda keys: store.pull_into(TABLE, keys, rows_out)),
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
    return [
        Figure(f"pull {size.shape(dim)}, {drawn}", ours, "M rows/s", limit, ours / plain),
        Figure(
            f"reference of it: torch.index_select on a plain matrix of {size.rows:,} x {dim}, {drawn}",
            plain,
            "M rows/s",
        ),
    ]


def _push_figures(store: _server.Store, draw: _Draw, size: EngineSize, random: np.random.Generator) -> list[Figure]:
    import torch

    weights, sums = torch.ones(size.rows, size.dim).numpy(), torch.ones(size.rows, size.dim).numpy()
    grads = random.standard_normal((size.batch, size.dim), np.float32)
    seconds = time_in_turns(
        [
            Contender("push", draw.keys, lambda keys: store.apply(TABLE, keys, grads, lr=LR)),
            Contender(
                "flat Adagrad",
                draw.rows,
                lambda rows: _bench.flat_adagrad(rows, grads, weights, sums, lr=LR, eps=EPS),
            ),
        ],
        repetitions=size.repetitions,
    )
    ours, plain = (size.batch / median(each) / 1e6 for each in seconds)
    return [
        Figure(f"Adagrad push {size.shape(size.dim)}", ours, "M rows/s", PUSH_LIMIT, ours / plain),
        Figure("reference of push: Adagrad in place on flat arrays", plain, "M rows/s"),
    ]
