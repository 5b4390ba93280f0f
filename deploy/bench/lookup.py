"""``bench lookup``: measures a small read, against a raw TCP ping-pong of the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .harness import Contender, Figure, latency_figure, median, time_in_turns
from .processes import SLOT_COUNT, BenchTable, raw_tcp, shard_process, table_id
from .wire import FRAME_BYTES


@dataclass(frozen=True)
class Size:
    """The amount that is read, and the number of repetitions."""

    table_rows: int = 2_000_000
    keys: int = 100
    dim: int = 64
    repetitions: int = 5_000


FULL = Size()
QUICK = Size(table_rows=20_000, repetitions=200)


def run_lookup(size: Size) -> Sequence[Figure]:
    """Returns p50 and p99 in microseconds of reads of ``size.keys`` new random keys, and of the ping-pong."""
    table = BenchTable("bench/lookup", size.dim, size.table_rows)
    request_bytes = FRAME_BYTES + 8 * size.keys
    reply_bytes = FRAME_BYTES + 4 * size.dim * size.keys
    with shard_process([table]) as port, raw_tcp(request_bytes + reply_bytes) as raw:
        from ...cpp_ext import _client

        client = _client.Client(shards=[("127.0.0.1", port)], slot_owner=np.zeros(SLOT_COUNT, np.uint16), route_epoch=1)
        number = table_id(table)
        random = np.random.default_rng(7)

        def fresh_keys() -> NDArray[np.int64]:
            return random.integers(0, size.table_rows, size.keys)

        ours, reference = time_in_turns(
            [
                Contender("lookup", fresh_keys, lambda keys: client.pull(number, keys, dim=size.dim)),
                Contender("raw TCP", lambda: None, lambda _: raw.exchange(request_bytes, reply_bytes)),
            ],
            repetitions=size.repetitions,
            warm_up=50,
        )
    name = f"lookup {size.keys} x {size.dim}"
    return [
        latency_figure(f"{name} p50", median(ours), 5.0, median(ours) / median(reference)),
        latency_figure(f"{name} p99", float(np.percentile(ours, 99))),
        latency_figure(f"{name}: raw TCP p50", median(reference)),
        latency_figure(f"{name}: raw TCP p99", float(np.percentile(reference, 99))),
    ]
