"""``bench wire``: rows over the network, against raw TCP that moves the same bytes.

One client process, one shard process, 50,000 fresh unique random keys of a table of two million rows: a pull, and
an Adagrad push. The reference sends as many bytes one way and the other on a plain connection, one in flight, and
takes turns with the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .harness import MIN_REPETITIONS, Contender, Figure, median, time_in_turns
from .processes import SLOT_COUNT, BenchTable, raw_tcp, shard_process, table_id

FRAME_BYTES = 64 + 16 + 40  # header, section header, table descriptor
_ACK_BYTES = 64 + 16 + 24
# What the fastest rival measured elsewhere reaches (M rows/s): torch RPC's pull, TensorFlow's and ps-lite's push.
_RIVALS = {("pull", 64): 6.9, ("push", 64): 3.2, ("pull", 16): 18.4, ("push", 16): 12.0}


@dataclass(frozen=True)
class Size:
    """How much is moved, and how often."""

    table_rows: int = 2_000_000
    keys: int = 50_000
    dims: tuple[int, ...] = (64, 16)
    repetitions: int = 60


FULL = Size()
QUICK = Size(table_rows=20_000, keys=2_000, dims=(16,), repetitions=MIN_REPETITIONS)


def run_wire(size: Size) -> Sequence[Figure]:
    """Pull and push of each dim: M rows/s with the ratio to raw TCP, the rival's figure, and raw TCP itself."""
    tables = [BenchTable(f"bench/wire{dim}", dim, size.table_rows) for dim in size.dims]
    largest = size.keys * (8 + 4 * max(size.dims)) + 4096
    figures: list[Figure] = []
    with shard_process(tables) as port, raw_tcp(largest) as raw:
        from ...cpp_ext import _client

        client = _client.Client(
            shards=[("127.0.0.1", port)],
            slot_owner=np.zeros(SLOT_COUNT, np.uint16),
            route_epoch=1,
            job_id=1,
            worker_id=0,
            worker_epoch=1,
        )
        random = np.random.default_rng(7)
        sequence = 0

        def fresh_keys() -> NDArray[np.int64]:
            return random.choice(size.table_rows, size.keys, replace=False).astype(np.int64)

        for table in tables:
            table_number, dim = table_id(table), table.dim
            grads = random.normal(size=(size.keys, dim)).astype(np.float32)
            key_bytes, row_bytes = 8 * size.keys, 4 * dim * size.keys

            def pull(keys: NDArray[np.int64], number: int = table_number, dim: int = dim) -> object:
                return client.pull(number, keys, dim=dim)

            def push(
                keys: NDArray[np.int64],
                number: int = table_number,
                dim: int = dim,
                grads: NDArray[np.float32] = grads,
            ) -> None:
                nonlocal sequence
                sequence += 1
                client.push(number, keys, grads, dim=dim, lr=0.01, sequence=sequence)

            for what, run, request_bytes, reply_bytes in (
                ("pull", pull, FRAME_BYTES + key_bytes, FRAME_BYTES + row_bytes),
                ("push", push, FRAME_BYTES + key_bytes + row_bytes, _ACK_BYTES),
            ):

                def exchange(_: object, there: int = request_bytes, back: int = reply_bytes) -> None:
                    raw.exchange(there, back)

                ours, reference = time_in_turns(
                    [Contender(f"{what} dim {dim}", fresh_keys, run), Contender("raw TCP", lambda: None, exchange)],
                    repetitions=size.repetitions,
                )
                rows_per_sec = size.keys / median(ours) / 1e6
                raw_rows_per_sec = size.keys / median(reference) / 1e6
                name = f"{what} {size.keys} x {dim}" + (", Adagrad" if what == "push" else "")
                ratio = rows_per_sec / raw_rows_per_sec
                figures.append(Figure(name, rows_per_sec, "M rows/s", limit=0.6 if dim == 64 else None, ratio=ratio))
                figures.append(Figure(f"{name}: raw TCP, same bytes", raw_rows_per_sec, "M rows/s"))
                rival = _RIVALS.get((what, dim))
                if rival is not None:
                    figures.append(Figure(f"{name}: times the best rival's {rival}", rows_per_sec / rival, "x"))
    return figures
