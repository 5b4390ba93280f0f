"""Measures the engine ``pages`` alone by the ways in which it reads its file, for ``sparserow bench tiers``.

A row is read and another is written: through the system's cache, past it by io_uring, and past it by reader threads.
Each way has a log of its own with the same rows, and they take turns. A way that this machine refuses is skipped, and
a line on the error stream names it and says why.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ...cpp_ext import _bench
from ...proto.errors import FailedPrecondition
from .harness import Figure

Keys = NDArray[np.uint64]

_FILL_ROWS = 8192  # rows of a write that fills a log


@dataclass(frozen=True)
class AccessSize:
    """The sizes of the measurement.

    Args:
        rows: the number of rows of each log.
        batch: the number of rows that a batch reads; it writes as many others.
        turns: the number of turns of each way.
        batches: the number of batches of a turn.
    """

    rows: int
    batch: int
    turns: int
    batches: int


@dataclass(frozen=True)
class _Access:
    name: str
    direct_io: bool
    with_uring: bool


_CACHED = _Access("through the cache", direct_io=False, with_uring=True)
_URING = _Access("direct I/O, io_uring", direct_io=True, with_uring=True)
_THREADS = _Access("direct I/O, reader threads", direct_io=True, with_uring=False)


@dataclass
class _Taken:
    """The sums of all turns of one way."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


def access_figures(size: AccessSize, row_bytes: int, random: np.random.Generator) -> Iterator[Figure]:
    """Yields the wall and CPU time of a row there and back, in microseconds, for each way that the machine allows.

    Args:
        size: the sizes of the measurement.
        row_bytes: the number of bytes of a stored row.
        random: the source of keys.
    """
    with ExitStack() as logs:
        raws: dict[_Access, _bench.RawSsd] = {}
        for access in _allowed():
            folder = logs.enter_context(tempfile.TemporaryDirectory())
            try:
                raws[access] = _bench.RawSsd(
                    folder, row_bytes=row_bytes, direct_io=access.direct_io, with_uring=access.with_uring
                )
            except FailedPrecondition as error:
                _name_skipped(access, str(error))
                continue
            logs.callback(raws.pop, access)  # the log closes before its folder goes
            _fill(raws[access], size.rows)
        taken = {access: _Taken() for access in raws}
        for turn in range(size.turns):
            for access in list(taken)[:: 1 if turn % 2 == 0 else -1]:
                _run_turn(raws[access], taken[access], size, random)
        rows = size.turns * size.batches * size.batch
        for access, sums in taken.items():
            shape = f"pages alone, {size.rows:,} rows of {row_bytes} bytes, {access.name}"
            for what, seconds in (("a row there and back", sums.seconds), ("CPU of it", sums.cpu_seconds)):
                yield Figure(f"{what}: {shape}", seconds * 1e6 / rows, "us", higher_is_better=False)


def _allowed() -> list[_Access]:
    if _bench.has_io_uring():
        return [_CACHED, _URING, _THREADS]
    _name_skipped(_URING, "the kernel does not allow io_uring to this process")
    return [_CACHED, _THREADS]


def _name_skipped(access: _Access, why: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"bench tiers: skipped {access.name}: {why}")


def _fill(raw: _bench.RawSsd, rows: int) -> None:
    for part in np.array_split(np.arange(rows, dtype=np.uint64), max(1, rows // _FILL_ROWS)):
        raw.serve(part[:0], part, are_known=False)


def _run_turn(raw: _bench.RawSsd, taken: _Taken, size: AccessSize, random: np.random.Generator) -> None:
    for _ in range(size.batches):
        keys = random.choice(size.rows, 2 * size.batch, replace=False).astype(np.uint64)
        seconds, cpu_seconds = time.perf_counter(), time.process_time()
        raw.serve(keys[: size.batch], keys[size.batch :], are_known=True)
        taken.seconds += time.perf_counter() - seconds
        taken.cpu_seconds += time.process_time() - cpu_seconds
