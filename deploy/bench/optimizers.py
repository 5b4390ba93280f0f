"""``sparserow bench optimizers``: measures a push with each optimizer, in one thread pinned to one CPU.

The reference is a C++ loop that does Adagrad in place on flat arrays (``cpp_ext/bindings/bench_flat_adagrad.cc``) with
as many bytes a row, weights and state together, of as many rows, at keys drawn the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...cpp_ext import _bench, _server
from ...proto.optim import FTRL, OPTIMIZERS, SGD, Adam, RMSprop, RowOptimizer
from ...ps_server.shard.native_schema import native_optimizer
from .harness import MIN_REPETITIONS, Contender, Figure, median, pinned_to_one_cpu, time_in_turns

LIMIT = 4.0  # times the flat loop
GROUP_LIMIT = 16.0  # the norm of a row is found in several passes over it
_TABLE, _LR, _EPS = 1, 0.01, 1e-10
_FLOAT = 4  # bytes
MEASURED: dict[str, RowOptimizer] = {
    **{kind: optimizer() for kind, optimizer in OPTIMIZERS.items()},
    "sgd, momentum": SGD(momentum=0.9),
    "adam, amsgrad": Adam(amsgrad=True),
    "rmsprop, centered, momentum": RMSprop(centered=True, momentum=0.9),
    "ftrl, L1": FTRL(l1=1.0),
    "ftrl, L1, group lasso": FTRL(l1=0.1, group_lasso=0.1),
}


@dataclass(frozen=True)
class OptimizersSize:
    """The sizes of one run.

    Args:
        rows: the number of rows of each table.
        dim: the number of float32 columns.
        batch: the number of unique keys of a push.
        repetitions: the number of repetitions of each measurement.
    """

    rows: int
    dim: int
    batch: int
    repetitions: int


FULL = OptimizersSize(rows=1_000_000, dim=64, batch=20_000, repetitions=60)
QUICK = OptimizersSize(rows=20_000, dim=64, batch=2_000, repetitions=MIN_REPETITIONS)


def run_optimizers(size: OptimizersSize, *, seed: int = 0) -> Iterator[Figure]:
    """Measures each optimizer; the full run takes about 3 GiB.

    Args:
        size: the sizes of the run.
        seed: the seed of keys and gradients.

    Yields:
        The time of a row, with its ratio to the flat loop, for each optimizer.
    """
    for name, optimizer in MEASURED.items():
        with pinned_to_one_cpu():
            figure = _measure(name, optimizer, size, np.random.default_rng(seed))
        yield figure


def _measure(name: str, optimizer: RowOptimizer, size: OptimizersSize, random: np.random.Generator) -> Figure:
    keys = (np.arange(size.rows, dtype=np.uint64) << np.uint64(16)) | np.uint64(random.integers(2**16))
    random.shuffle(keys)
    store = _server.Store()
    store.create_table(
        _server.TableSchema(
            id=_TABLE,
            name="bench/optimizers",
            dim=size.dim,
            init=_server.InitSpec(kind="uniform", a=-0.05, b=0.05),
            optimizer=native_optimizer(optimizer),
        )
    )
    grads = random.standard_normal((size.batch, size.dim), np.float32)
    for begin in range(0, size.rows, size.batch):
        part = keys[begin : begin + size.batch]
        store.apply(_TABLE, part, grads[: len(part)], lr=_LR)
    state = optimizer.state_floats(size.dim)
    half = (size.dim + state) // 2
    weights, sums = np.ones((size.rows, half), np.float32), np.ones((size.rows, half), np.float32)
    flat_grads = np.resize(grads, (size.batch, half))

    def draw() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return random.choice(size.rows, size=size.batch, replace=False)

    seconds = time_in_turns(
        [
            Contender(name, lambda: keys[draw()], lambda some: store.apply(_TABLE, some, grads, lr=_LR)),
            Contender(
                "flat loop",
                draw,
                lambda rows: _bench.flat_adagrad(rows, flat_grads, weights, sums, lr=_LR, eps=_EPS),
            ),
        ],
        repetitions=size.repetitions,
    )
    ours, flat = (median(each) / size.batch * 1e9 for each in seconds)
    metric = f"{name}: {_FLOAT * state} B of state, {size.batch:,} of {size.rows:,} x {size.dim}"
    limit = GROUP_LIMIT if isinstance(optimizer, FTRL) and optimizer.group_lasso > 0 else LIMIT
    return Figure(metric, ours, "ns/row", limit, ours / flat, higher_is_better=False)
