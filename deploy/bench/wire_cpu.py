"""A part of ``bench wire``: the CPU time that a shard spends on a row, for one client and for four.

Its reference is what no shard can do without: the CPU time of the store alone on the same batches, and that of a
process that only receives and sends as many bytes by raw TCP. CPU times are those of whole processes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, cycle
from multiprocessing.connection import Connection
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .harness import Figure, median, process_cpu
from .processes import (
    ACK_BYTES,
    FRAME_BYTES,
    BenchTable,
    bench_client,
    filled_store,
    first_word,
    raw_tcp,
    shard_process,
    spawned,
    table_id,
)

LIMIT = 1.25
_CLIENTS = (1, 4)
_ROUNDS, _BATCHES = 3, 8
_LEARNING_RATE = 0.01
_CALL_SEC = 300.0

Value = TypeVar("Value")
Keys: TypeAlias = NDArray[np.uint64]
Rows: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class CpuSize:
    """The rows of a table, keys of a batch, columns, and batches that each client moves in each of three rounds."""

    table_rows: int
    keys: int
    dims: tuple[int, ...]
    batches: int


def measure_server_cpu(size: CpuSize) -> list[Figure]:
    """Returns microseconds of the shard's CPU a row, relative to the store alone and raw TCP together."""
    return [figure for dim in size.dims for figure in _of_dim(size, dim)]


def _of_dim(size: CpuSize, dim: int) -> Iterator[Figure]:
    table = BenchTable(f"bench/cpu{dim}", dim, size.table_rows)
    with ExitStack() as stack:
        port, shard_pid = stack.enter_context(_with_pid(shard_process([table], jobs=max(_CLIENTS))))
        raw, raw_pid = stack.enter_context(_with_pid(raw_tcp(size.keys * (8 + 4 * dim) + 4096)))
        clients = [stack.enter_context(spawned(_move, (port, table, size, job))) for job in range(1, max(_CLIENTS) + 1)]
        for client in clients:
            first_word(client)
        alone = _store_cpu(size, table)
        for what in ("pull", "push"):
            there = FRAME_BYTES + size.keys * (8 + (4 * dim if what == "push" else 0))
            back = FRAME_BYTES + size.keys * 4 * dim if what == "pull" else ACK_BYTES

            def exchange(there: int = there, back: int = back) -> None:
                for _ in range(size.batches):
                    raw.exchange(there, back)

            kernel = _cpu_of_a_row(raw_pid, size, 1, exchange)
            for number in _CLIENTS:

                def move(what: str = what, number: int = number) -> None:
                    for client in clients[:number]:
                        client.send(what)
                    for client in clients[:number]:
                        _wait_for(client)

                ours = _cpu_of_a_row(shard_pid, size, number, move)
                yield Figure(
                    f"{what} {size.keys} x {dim}, {number} client{'s' if number > 1 else ''}: shard's CPU a row",
                    ours,
                    "us",
                    LIMIT,
                    ours / (alone[what] + kernel),
                    higher_is_better=False,
                )
            yield Figure(f"{what} {size.keys} x {dim}: the store's CPU a row", alone[what], "us")
            yield Figure(f"{what} {size.keys} x {dim}: raw TCP's CPU a row", kernel, "us")


def _cpu_of_a_row(pid: int, size: CpuSize, clients: int, move: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        begin = process_cpu(pid)
        move()
        seconds.append(process_cpu(pid) - begin)
    return median(seconds) / (clients * size.batches * size.keys) * 1e6


def _batches(size: CpuSize, seed: int) -> list[Keys]:
    random = np.random.default_rng(seed)
    return [random.choice(size.table_rows, size.keys, replace=False).astype(np.uint64) for _ in range(_BATCHES)]


def _store_cpu(size: CpuSize, table: BenchTable) -> dict[str, float]:
    """Returns microseconds a row of a store of this process, by what is done."""
    store, number = filled_store([table]), table_id(table)
    out: Rows = np.zeros((size.keys, table.dim), np.float32)
    grads: Rows = np.full((size.keys, table.dim), 0.01, np.float32)
    work: dict[str, Callable[[Keys], object]] = {
        "pull": lambda keys: store.pull_into(number, keys, out),
        "push": lambda keys: store.apply(number, keys, grads, lr=_LEARNING_RATE),
    }
    spent = {}
    for what, run in work.items():
        next_keys = cycle(_batches(size, 7)).__next__
        seconds = []
        for _ in range(_ROUNDS * size.batches + 1):
            keys = next_keys()
            begin = time.thread_time()
            run(keys)
            seconds.append(time.thread_time() - begin)
        spent[what] = median(seconds[1:]) / size.keys * 1e6
    return spent


def _move(orders: Connection, port: int, table: BenchTable, size: CpuSize, job: int) -> None:
    """Is a client: moves some batches whenever an order says what to do with them."""
    client = bench_client(port, job=job)
    number, sequences = table_id(table), count(1)
    next_keys = cycle([keys.astype(np.int64) for keys in _batches(size, job)]).__next__
    grads: Rows = np.full((size.keys, table.dim), 0.01, np.float32)
    client.pull(number, next_keys(), dim=table.dim)
    orders.send("ready")
    while True:
        try:
            what = orders.recv()
        except EOFError:
            return
        for _ in range(size.batches):
            if what == "pull":
                client.pull(number, next_keys(), dim=table.dim)
            else:
                client.push(number, next_keys(), grads, dim=table.dim, lr=_LEARNING_RATE, sequence=next(sequences))
        orders.send("done")


def _wait_for(client: Connection) -> None:
    if not client.poll(_CALL_SEC):
        raise TimeoutError(f"a client of the benchmark did not end its batches within {_CALL_SEC:.0f} s")
    client.recv()


@contextmanager
def _with_pid(started: AbstractContextManager[Value]) -> Iterator[tuple[Value, int]]:
    """Yields what a context manager that starts one process yields, and the number of that process."""
    before = multiprocessing.active_children()
    with started as value:
        (process,) = (child for child in multiprocessing.active_children() if child not in before)
        assert process.pid is not None
        yield value, process.pid
