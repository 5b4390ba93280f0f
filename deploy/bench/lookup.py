"""``bench lookup``: measures small reads by TCP and within the host, against a raw TCP ping-pong of the same bytes.

A client reads new random keys in a closed loop on idle CPUs, then beside two processes that keep a CPU busy each, as
the system wakes an idle CPU late and shares a busy one; then 1,000 reads a second, each when it is due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .harness import Contender, Figure, latency_figure, median, time_in_turns
from .processes import FRAME_BYTES, BenchTable, RawTcp, bench_client, raw_tcp, shard_process, spawned, table_id

_LIMIT = 3.0  # round trips of raw TCP
_BUSY_PROCESSES = 2
_SPUN_SEC = 200e-6  # a sleep ends later by less
_RAW = "raw TCP"

Read: TypeAlias = Callable[[NDArray[np.uint64]], object]


@dataclass(frozen=True)
class Size:
    """The rows of the table, keys of the reads, the number of repetitions, and reads a second of the open loop."""

    table_rows: int = 2_000_000
    keys: tuple[int, ...] = (100, 500, 2_000)
    dim: int = 64
    repetitions: int = 5_000
    rate: int = 1_000


FULL = Size()
QUICK = Size(table_rows=20_000, repetitions=200)


def run_lookup(size: Size) -> Sequence[Figure]:
    """Returns p50 and p99 in microseconds of the reads, and of the ping-pong."""
    table = BenchTable("bench/lookup", size.dim, size.table_rows)
    largest = 2 * FRAME_BYTES + (8 + 4 * size.dim) * max(size.keys)
    with shard_process([table]) as port, raw_tcp(largest) as raw:
        reads: dict[str, Read] = {
            "by TCP": partial(bench_client(port).pull, table_id(table), dim=size.dim),
            "within the host": partial(bench_client(port, transport="shm").pull, table_id(table), dim=size.dim),
        }
        figures = [figure for keys in size.keys for figure in _closed(size, keys, reads, raw, "")]
        with _busy():
            figures += _closed(size, size.keys[0], reads, raw, f", beside {_BUSY_PROCESSES} busy processes")
        return [*figures, *_open(size, size.keys[0], reads)]


def _closed(size: Size, keys: int, reads: dict[str, Read], raw: RawTcp, words: str) -> Iterator[Figure]:
    request_bytes, reply_bytes = FRAME_BYTES + 8 * keys, FRAME_BYTES + 4 * size.dim * keys
    random = np.random.default_rng(7)
    contenders = [Contender(name, lambda: _drawn(random, size, keys), read) for name, read in reads.items()]
    contenders.append(Contender(_RAW, lambda: None, lambda _: raw.exchange(request_bytes, reply_bytes)))
    timed = time_in_turns(contenders, repetitions=size.repetitions, warm_up=50)
    seconds = dict(zip((contender.name for contender in contenders), timed, strict=True))
    for name, taken in seconds.items():
        title = f"lookup {keys} x {size.dim} {name}{words}"
        is_judged = name != _RAW and not words
        ratio = median(taken) / median(seconds[_RAW]) if is_judged else None
        yield latency_figure(f"{title} p50", median(taken), _LIMIT if is_judged else None, ratio)
        yield latency_figure(f"{title} p99", float(np.percentile(taken, 99)))


def _drawn(random: np.random.Generator, size: Size, keys: int) -> NDArray[np.uint64]:
    return random.integers(0, size.table_rows, keys, dtype=np.uint64)


def _open(size: Size, keys: int, reads: dict[str, Read]) -> Iterator[Figure]:
    """Yields the times from when a read is due to its end, one read after another."""
    random = np.random.default_rng(8)
    for name, read in reads.items():
        batches = [_drawn(random, size, keys) for _ in range(size.repetitions)]
        taken = []
        begin = time.perf_counter()
        for number, batch in enumerate(batches):
            due = begin + number / size.rate
            time.sleep(max(0.0, due - time.perf_counter() - _SPUN_SEC))
            while time.perf_counter() < due:
                pass
            read(batch)
            taken.append(time.perf_counter() - due)
        title = f"lookup {keys} x {size.dim} {name}, {size.rate:,} a second"
        yield latency_figure(f"{title} p50", median(taken))
        yield latency_figure(f"{title} p99", float(np.percentile(taken, 99)))


@contextmanager
def _busy() -> Iterator[None]:
    """Runs its block beside processes that never wait."""
    with ExitStack() as stack:
        for _ in range(_BUSY_PROCESSES):
            stack.enter_context(spawned(_spin, ()))
        time.sleep(1.0)  # until they have begun
        yield


def _spin(parent: Connection) -> None:
    while not parent.poll():
        for _ in range(100_000):
            pass
