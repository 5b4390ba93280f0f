"""Several threads on one store of ``sparserow bench engine``: pulls and pushes on four cores, against one.

Each thread has a core of its own; two CPUs of one core share it, and count as one. Threads begin together, and each
goes through batches of its own, whose keys are drawn before. The same number of threads run ``index_select`` on a plain
matrix beside it, since memory that all cores share bounds both. Where there are fewer cores there is no figure.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _server
from .engine_filling import LR, TABLE
from .harness import Figure, median

__all__ = ["CORES", "cores_figures", "cores_of_machine"]

CORES = 4
SCALING_LIMIT = 3.5
_BATCHES = 24  # of one thread in one round
_ROUNDS = 6  # the first is a warm-up


def cores_of_machine(topology: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Returns one CPU of each core that this process may use; every CPU where the system names no cores."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        path = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        found.setdefault(path.read_text().strip() if path.exists() else str(cpu), cpu)
    return sorted(found.values())


def cores_figures(
    store: _server.Store, keys: NDArray[np.uint64], dim: int, batch: int, cpus: Sequence[int]
) -> list[Figure]:
    """Returns the figures of one thread for each of ``cpus``, each against one thread alone.

    Args:
        store: has the table of the benchmark, with a row for each key.
        keys: all keys of the table, (n,), in any order.
        dim: the number of float32 columns.
        batch: the number of unique keys of a pull or push.
        cpus: a CPU for each thread.
    """
    import torch

    torch.set_num_threads(1)
    random = np.random.default_rng(1)
    drawn = [[random.integers(0, len(keys), batch) for _ in range(_BATCHES)] for _ in cpus]
    wanted = [[np.unique(keys[rows]) for rows in own] for own in drawn]
    plain = [[torch.from_numpy(rows) for rows in own] for own in drawn]
    outs = [np.zeros((batch, dim), np.float32) for _ in cpus]
    matrix_outs = [torch.zeros(batch, dim) for _ in cpus]
    grads = np.ones((batch, dim), np.float32)
    matrix = torch.ones(len(keys), dim)

    def pull(thread: int, at: int) -> None:
        some = wanted[thread][at]
        store.pull_into(TABLE, some, outs[thread][: len(some)])

    def push(thread: int, at: int) -> None:
        some = wanted[thread][at]
        store.apply(TABLE, some, grads[: len(some)], lr=LR)

    def select(thread: int, at: int) -> None:
        torch.index_select(matrix, 0, plain[thread][at], out=matrix_outs[thread])

    unique = sum(len(each) for own in wanted for each in own) / len(cpus)
    works: dict[str, tuple[Callable[[int, int], None], float]] = {
        "pull": (pull, unique),
        "push": (push, unique),
        "torch.index_select": (select, float(batch * _BATCHES)),
    }
    rates: dict[tuple[str, int], list[float]] = {(name, n): [] for name in works for n in (1, len(cpus))}
    for round_ in range(_ROUNDS):
        for (name, threads), found in rates.items():
            work, rows = works[name]
            seconds = _seconds_of(work, cpus[:threads])
            if round_:
                found.append(threads * rows / seconds / 1e6)
    figures = []
    for name in works:
        one, all_ = (median(rates[name, n]) for n in (1, len(cpus)))
        limit = SCALING_LIMIT if len(cpus) == CORES and name != "torch.index_select" else None
        words = f"{name} x {dim} by {len(cpus)} threads on as many cores, of one thread"
        figures.append(Figure(words if limit else f"reference: {words}", all_, "M rows/s", limit, all_ / one))
    return figures


def _seconds_of(work: Callable[[int, int], None], cpus: Sequence[int]) -> float:
    """Runs a round in a thread for each CPU; returns the seconds from the first begin to the last end."""
    together = threading.Barrier(len(cpus) + 1)
    ends: list[float] = []

    def run(thread: int) -> None:
        os.sched_setaffinity(0, {cpus[thread]})  # of this thread alone
        together.wait()
        for at in range(_BATCHES):
            work(thread, at)
        ends.append(time.perf_counter())

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(cpus))]
    for each in threads:
        each.start()
    together.wait()
    began = time.perf_counter()
    for each in threads:
        each.join()
    if len(ends) < len(cpus):
        raise RuntimeError("bench engine: a thread ended without its round")
    return max(ends) - began
