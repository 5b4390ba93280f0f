"""``bench wire``: measures rows between processes by TCP and through shared memory, against what bounds each.

One client process pulls and pushes 50,000 unique random keys of a table of two million rows in one shard process, other
ones each time. They are drawn before the measurements, since a draw goes through the caches of both processes. Rows lie
in memory of the client that is used again, as in a step of training. The push uses Adagrad.

All take turns. By TCP the reference is a plain connection that moves as many bytes each way, one message in flight.
Within the host it is the store alone, by as many threads as the shard has; a copy of the rows' bytes stands beside it.

Torch RPC before a plain matrix is measured by two processes of its own, which live for a part of each round: a thread
of its shared-memory transport polls without pause in each of them, which takes the CPUs from whatever else is measured.
The CPU time that the shard spends on a row (``wire_cpu.py``) is measured last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...proto.transport import Transport
from .harness import MIN_REPETITIONS, Contender, Figure, median, time_in_turns
from .processes import (
    ACK_BYTES,
    FRAME_BYTES,
    BenchTable,
    RawTcp,
    bench_client,
    filled_store,
    raw_tcp,
    shard_process,
    table_id,
)
from .torch_rpc import TRANSPORTS, torch_rpc
from .wire_cpu import CpuSize, measure_server_cpu

if TYPE_CHECKING:
    from ...cpp_ext import _bench, _client, _server

_BATCHES, _ROUNDS = 30, 3
_LEARNING_RATE = 0.01
_SHARD_THREADS = 2
_WAYS: dict[str, Transport] = {"TCP": "tcp", "shared memory": "shm"}
_RAW, _ALONE, _COPY = "raw TCP, same bytes", "the store alone", "a copy of the rows"
_LIMITS = {("pull", 64): 0.75, ("push", 64): 0.6, ("pull", 16): 0.45, ("push", 16): 0.45}  # of raw TCP
_RIVAL_LIMITS = {"TCP": 1.0, "shared memory": 1.3}
_TCP_LIMITS = {("pull", 64): 1.8, ("pull", 16): 1.7}  # of shared memory, of TCP
_ALONE_LIMITS = {("push", 64): 0.85, ("push", 16): 0.8}  # of shared memory, of the store alone


@dataclass(frozen=True)
class Size:
    """The amount that is moved, and the number of repetitions of each of three rounds."""

    table_rows: int = 2_000_000
    keys: int = 50_000
    dims: tuple[int, ...] = (64, 16)
    repetitions: int = 20


FULL = Size()
QUICK = Size(table_rows=20_000, keys=2_000, dims=(16,), repetitions=-(-MIN_REPETITIONS // _ROUNDS))

Keys: TypeAlias = NDArray[np.uint64]
Run: TypeAlias = Callable[[Keys], object]


@dataclass
class WireWork:
    """A pull or push of one table, with the seconds of all repetitions so far, by who did it.

    Attributes:
        what: pull or push.
        dim: columns of the table.
        runs: does it, by the transport and by the names of what it is compared with.
        request_bytes, reply_bytes: of its frames by TCP.
        seconds: of all repetitions, by the names of ``runs`` and of torch RPC.
    """

    what: str
    dim: int
    runs: dict[str, Run]
    request_bytes: int
    reply_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def measure(self, next_keys: Callable[[], Keys], repetitions: int) -> None:
        """Does it by all in turns."""
        contenders = [Contender(name, next_keys, run) for name, run in self.runs.items()]
        for contender, seconds in zip(contenders, time_in_turns(contenders, repetitions=repetitions), strict=True):
            self.seconds[contender.name] += seconds

    def figures(self, keys: int) -> Iterator[Figure]:
        """Yields M rows/s of all, and how they compare."""
        rates = {who: keys / median(seconds) / 1e6 for who, seconds in self.seconds.items()}
        name = f"{self.what} {keys} x {self.dim}" + (", Adagrad" if self.what == "push" else "")
        case = (self.what, self.dim)

        def ratio(of: str, reference: str, limits: Mapping[tuple[str, int], float]) -> Figure:
            words = f"{name} by {of}, of {reference}"
            return Figure(words, rates[of], "M rows/s", limits.get(case), rates[of] / rates[reference])

        for who, rate in rates.items():
            yield Figure(f"{name}: {who}", rate, "M rows/s")
        yield ratio("TCP", _RAW, _LIMITS)
        yield ratio("shared memory", "TCP", _TCP_LIMITS)
        yield ratio("shared memory", _ALONE, _ALONE_LIMITS)
        for way, limit in _RIVAL_LIMITS.items():
            yield ratio(way, _rival(way), {case: limit})


def _rival(transport: str) -> str:
    return f"torch RPC over {transport}"


def run_wire(size: Size) -> Sequence[Figure]:
    """Returns M rows/s of pull and push for each dim by both transports and of what they are compared with. Then the
    shard's CPU a row.
    """
    tables = [BenchTable(f"bench/wire{dim}", dim, size.table_rows) for dim in size.dims]
    random = np.random.default_rng(7)
    batches = [random.choice(size.table_rows, size.keys, replace=False).astype(np.uint64) for _ in range(_BATCHES)]
    next_keys = cycle(batches).__next__
    with _works(tables, size) as works:
        for _ in range(_ROUNDS):
            for work in works:
                work.measure(next_keys, size.repetitions)
            for transport in TRANSPORTS:
                with torch_rpc(size.dims, size.table_rows, size.keys, transport) as rival:
                    for work in works:
                        seconds = rival.seconds(work.what, work.dim, size.repetitions)
                        work.seconds[_rival(transport)] += seconds
    figures = [figure for work in works for figure in work.figures(size.keys)]
    return [*figures, *measure_server_cpu(CpuSize(size.table_rows, size.keys, size.dims, size.repetitions))]


@contextmanager
def _works(tables: Sequence[BenchTable], size: Size) -> Iterator[list[WireWork]]:
    """Yields the works by both transports, with what they are compared with."""
    largest = size.keys * (8 + 4 * max(size.dims)) + 4096
    with shard_process(tables, io_threads=_SHARD_THREADS, jobs=len(_WAYS)) as port, raw_tcp(largest) as raw:
        clients = {
            way: bench_client(port, job=job, transport=transport)
            for job, (way, transport) in enumerate(_WAYS.items(), start=1)
        }
        works = wire_works(clients, tables, size)
        store = filled_store(tables)
        with ThreadPoolExecutor(_SHARD_THREADS) as threads:
            for work in works:
                rows = np.ones((size.keys, work.dim), np.float32)
                copy = np.zeros_like(rows)
                work.runs[_RAW] = partial(exchange_of, raw, work)
                work.runs[_ALONE] = _alone(store, work, rows, threads)
                work.runs[_COPY] = lambda _, rows=rows, copy=copy: np.copyto(copy, rows)  # type: ignore[misc]
            yield works


def _alone(store: _server.Store, work: WireWork, rows: NDArray[np.float32], threads: ThreadPoolExecutor) -> Run:
    """Returns what pulls into ``rows``, or pushes them, in a store of this process, by as many threads as a shard."""
    number = table_id(BenchTable(f"bench/wire{work.dim}", work.dim, 0))
    parts = np.array_split(np.arange(len(rows)), _SHARD_THREADS)
    slices = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]

    def run_part(keys: Keys, part: slice) -> None:
        if work.what == "pull":
            store.pull_into(number, keys[part], rows[part])
        else:
            store.apply(number, keys[part], rows[part], lr=_LEARNING_RATE)

    return lambda keys: list(threads.map(partial(run_part, keys), slices))


def exchange_of(raw: RawTcp, work: WireWork, _: object) -> None:
    """Sends and receives the bytes of a work by raw TCP."""
    raw.exchange(work.request_bytes, work.reply_bytes)


def wire_works(clients: Mapping[str, _client.Client], tables: Sequence[BenchTable], size: Size) -> list[WireWork]:
    """Returns pull and push of each table.

    Args:
        clients: by the name of what does the work.
        tables: that the shard has.
        size: of a batch.
    """
    from ...cpp_ext import _bench

    random = np.random.default_rng(8)
    sequences = {name: count(1) for name in clients}  # a shard expects them to rise over all tables
    works = []
    for table in tables:
        dim, key_bytes, row_bytes = table.dim, 8 * size.keys, 4 * table.dim * size.keys
        pull = WireWork("pull", dim, {}, FRAME_BYTES + key_bytes, FRAME_BYTES + row_bytes)
        push = WireWork("push", dim, {}, FRAME_BYTES + key_bytes + row_bytes, ACK_BYTES)
        for name, client in clients.items():
            grads = random.normal(size=(size.keys, dim)).astype(np.float32)
            pull.runs[name] = _bench.LeasedRows(client, table_id(table), grads).pull
            push.runs[name] = partial(_push, _bench.LeasedRows(client, table_id(table), grads), sequences[name])
        works += [pull, push]
    return works


def _push(rows: _bench.LeasedRows, sequences: Iterator[int], keys: Keys) -> None:
    rows.push(keys, lr=_LEARNING_RATE, sequence=next(sequences))
