"""``bench lookup``: measures a small read, against a raw TCP ping-pong of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .harness import Contender, Figure, latency_figure, median, time_in_turns
from .processes import FRAME_BYTES, SLOT_COUNT, BenchTable, RawTcp, raw_tcp, shard_process, table_id

_LIMIT = 3.0  # round trips of raw TCP


@dataclass(frozen=True)
class Size:
    """The rows of the table, keys of the reads, and the number of repetitions."""

    table_rows: int = 2_000_000
    keys: tuple[int, ...] = (100, 500)
    dim: int = 64
    repetitions: int = 5_000


FULL = Size()
QUICK = Size(table_rows=20_000, repetitions=200)


def run_lookup(size: Size) -> Sequence[Figure]:
    """Returns p50 and p99 in microseconds of reads of new random keys, and of the ping-pong."""
    table = BenchTable("bench/lookup", size.dim, size.table_rows)
    largest = 2 * FRAME_BYTES + (8 + 4 * size.dim) * max(size.keys)
    with shard_process([table]) as port, raw_tcp(largest) as raw:
        from ...cpp_ext import _client

        client = _client.Client(shards=[("127.0.0.1", port)], slot_owner=np.zeros(SLOT_COUNT, np.uint16), route_epoch=1)
        pull = partial(client.pull, table_id(table), dim=size.dim)
        return [figure for keys in size.keys for figure in _measure(size, keys, pull, raw)]


def _measure(size: Size, keys: int, pull: Callable[[NDArray[np.int64]], object], raw: RawTcp) -> list[Figure]:
    request_bytes, reply_bytes = FRAME_BYTES + 8 * keys, FRAME_BYTES + 4 * size.dim * keys
    random = np.random.default_rng(7)
    ours, reference = time_in_turns(
        [
            Contender("lookup", lambda: random.integers(0, size.table_rows, keys), pull),
            Contender("raw TCP", lambda: None, lambda _: raw.exchange(request_bytes, reply_bytes)),
        ],
        repetitions=size.repetitions,
        warm_up=50,
    )
    name = f"lookup {keys} x {size.dim}"
    return [
        latency_figure(f"{name} p50", median(ours), _LIMIT, median(ours) / median(reference)),
        latency_figure(f"{name} p99", float(np.percentile(ours, 99))),
        latency_figure(f"{name}: raw TCP p50", median(reference)),
        latency_figure(f"{name}: raw TCP p99", float(np.percentile(reference, 99))),
    ]
