"""``bench wire``: measures rows over the network, against raw TCP that moves the same bytes.

One client process pulls and pushes 50,000 unique random keys of a table of two million rows in one shard process, other
ones each time. They are drawn before the measurements, since a draw goes through the caches of both processes.
The push uses Adagrad. The reference sends as many bytes in each direction on a plain connection, one in flight, and
takes turns with the measurement.

Torch RPC before a plain matrix is measured by two processes of its own, which live for a part of each round: a thread
of its shared-memory transport polls without pause in each of them, which takes the CPUs from whatever else is measured.
The CPU time that the shard spends on a row (``wire_cpu.py``) is measured last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .harness import MIN_REPETITIONS, Contender, Figure, median, time_in_turns
from .processes import ACK_BYTES, FRAME_BYTES, BenchTable, RawTcp, bench_client, raw_tcp, shard_process, table_id
from .torch_rpc import TRANSPORTS, torch_rpc
from .wire_cpu import CpuSize, measure_server_cpu

if TYPE_CHECKING:
    from ...cpp_ext import _client

_BATCHES, _ROUNDS = 30, 3
_LIMITS = {("pull", 64): 0.75, ("push", 64): 0.6, ("pull", 16): 0.45, ("push", 16): 0.45}  # of raw TCP
_RIVAL_LIMITS = {"TCP": 1.0, "shared memory": 0.9}
_OURS, _RAW = "ours", "raw TCP, same bytes"


@dataclass(frozen=True)
class Size:
    """The amount that is moved, and the number of repetitions of each of three rounds."""

    table_rows: int = 2_000_000
    keys: int = 50_000
    dims: tuple[int, ...] = (64, 16)
    repetitions: int = 20


FULL = Size()
QUICK = Size(table_rows=20_000, keys=2_000, dims=(16,), repetitions=-(-MIN_REPETITIONS // _ROUNDS))

Keys: TypeAlias = NDArray[np.int64]


@dataclass
class WireWork:
    """A pull or push of one table, with the seconds of all repetitions so far, by who did it."""

    what: str
    dim: int
    run: Callable[[Keys], object]
    request_bytes: int
    reply_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, repetitions: int, *contenders: Contender) -> None:
        timed = time_in_turns(contenders, repetitions=repetitions)
        for contender, seconds in zip(contenders, timed, strict=True):
            self.seconds[contender.name] += seconds

    def figures(self, keys: int) -> list[Figure]:
        name = f"{self.what} {keys} x {self.dim}" + (", Adagrad" if self.what == "push" else "")
        rates = {who: keys / median(seconds) / 1e6 for who, seconds in self.seconds.items()}
        ours, limit = rates[_OURS], rates[_RAW]
        figures = [
            Figure(name, ours, "M rows/s", limit=_LIMITS[self.what, self.dim], ratio=ours / limit),
            Figure(f"{name}: {_RAW}", limit, "M rows/s"),
        ]
        for transport in TRANSPORTS:
            rival = f"torch RPC over {transport}"
            figures += [
                Figure(f"{name}: {rival}", rates[rival], "M rows/s"),
                Figure(
                    f"{name}: of {rival}",
                    ours,
                    "M rows/s",
                    limit=_RIVAL_LIMITS[transport],
                    ratio=ours / rates[rival],
                ),
            ]
        return figures


def run_wire(size: Size) -> Sequence[Figure]:
    """Returns M rows/s of pull and push for each dim: relative to raw TCP, raw TCP itself, and
    relative to torch RPC over TCP and over shared memory. Then the shard's CPU a row.
    """
    tables = [BenchTable(f"bench/wire{dim}", dim, size.table_rows) for dim in size.dims]
    largest = size.keys * (8 + 4 * max(size.dims)) + 4096
    random = np.random.default_rng(7)
    batches = [random.choice(size.table_rows, size.keys, replace=False).astype(np.int64) for _ in range(_BATCHES)]
    next_keys = cycle(batches).__next__
    with shard_process(tables) as port, raw_tcp(largest) as raw:
        client = bench_client(port)
        works = wire_works(client, tables, size, random)
        for _ in range(_ROUNDS):
            for work in works:
                exchange = partial(exchange_of, raw, work)
                work.add(size.repetitions, Contender(_OURS, next_keys, work.run), Contender(_RAW, _nothing, exchange))
            for transport in TRANSPORTS:
                with torch_rpc(size.dims, size.table_rows, size.keys, transport) as rival:
                    for work in works:
                        seconds = rival.seconds(work.what, work.dim, size.repetitions)
                        work.seconds[f"torch RPC over {transport}"] += seconds
    figures = [figure for work in works for figure in work.figures(size.keys)]
    return [*figures, *measure_server_cpu(CpuSize(size.table_rows, size.keys, size.dims, size.repetitions))]


def _nothing() -> None:
    return None


def exchange_of(raw: RawTcp, work: WireWork, _: object) -> None:
    """Sends and receives the bytes of a work by raw TCP."""
    raw.exchange(work.request_bytes, work.reply_bytes)


def wire_works(
    client: _client.Client, tables: Sequence[BenchTable], size: Size, random: np.random.Generator
) -> list[WireWork]:
    sequences = count(1)
    works = []
    for table in tables:
        number, dim = table_id(table), table.dim
        grads = random.normal(size=(size.keys, dim)).astype(np.float32)
        key_bytes, row_bytes = 8 * size.keys, 4 * dim * size.keys

        def pull(keys: Keys, number: int = number, dim: int = dim) -> object:
            return client.pull(number, keys, dim=dim)

        def push(keys: Keys, number: int = number, dim: int = dim, grads: NDArray[np.float32] = grads) -> None:
            client.push(number, keys, grads, dim=dim, lr=0.01, sequence=next(sequences))

        works += [
            WireWork("pull", dim, pull, FRAME_BYTES + key_bytes, FRAME_BYTES + row_bytes),
            WireWork("push", dim, push, FRAME_BYTES + key_bytes + row_bytes, ACK_BYTES),
        ]
    return works
