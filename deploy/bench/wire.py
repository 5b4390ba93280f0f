"""``bench wire``: measures rows over the network, against raw TCP that moves the same bytes.

One client process pulls and pushes 50,000 new unique random keys of a table of two million rows in one shard process.
The push uses Adagrad. The reference sends as many bytes in each direction on a plain connection, one in flight, and
takes turns with the measurement. So does torch RPC before a plain matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .harness import MIN_REPETITIONS, Contender, Figure, median, time_in_turns
from .processes import SLOT_COUNT, BenchTable, raw_tcp, shard_process, table_id
from .torch_rpc import torch_rpc

FRAME_BYTES = 64 + 16 + 40  # bytes of header, section header and table descriptor
ACK_BYTES = 64 + 16 + 24


@dataclass(frozen=True)
class Size:
    """The amount that is moved, and the number of repetitions."""

    table_rows: int = 2_000_000
    keys: int = 50_000
    dims: tuple[int, ...] = (64, 16)
    repetitions: int = 60


FULL = Size()
QUICK = Size(table_rows=20_000, keys=2_000, dims=(16,), repetitions=MIN_REPETITIONS)


def run_wire(size: Size) -> Sequence[Figure]:
    """Returns M rows/s of pull and push for each dim: relative to raw TCP, raw TCP itself, and
    relative to torch RPC.
    """
    tables = [BenchTable(f"bench/wire{dim}", dim, size.table_rows) for dim in size.dims]
    largest = size.keys * (8 + 4 * max(size.dims)) + 4096
    figures: list[Figure] = []
    with (
        shard_process(tables) as port,
        raw_tcp(largest) as raw,
        torch_rpc(size.dims, size.table_rows) as rival,
    ):
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

            def rival_pull(keys: NDArray[np.int64], dim: int = dim) -> object:
                return rival.pull(dim, torch.from_numpy(keys))

            def rival_push(keys: NDArray[np.int64], dim: int = dim, grads: NDArray[np.float32] = grads) -> None:
                rival.push(dim, torch.from_numpy(keys), torch.from_numpy(grads), lr=0.01)

            for what, run, run_rival, request_bytes, reply_bytes in (
                ("pull", pull, rival_pull, FRAME_BYTES + key_bytes, FRAME_BYTES + row_bytes),
                ("push", push, rival_push, FRAME_BYTES + key_bytes + row_bytes, ACK_BYTES),
            ):

                def exchange(_: object, there: int = request_bytes, back: int = reply_bytes) -> None:
                    raw.exchange(there, back)

                contenders = [
                    Contender(f"{what} dim {dim}", fresh_keys, run),
                    Contender("raw TCP", lambda: None, exchange),
                    Contender("torch RPC", fresh_keys, run_rival),
                ]
                ours, limit, theirs = (
                    size.keys / median(seconds) / 1e6
                    for seconds in time_in_turns(contenders, repetitions=size.repetitions)
                )
                name = f"{what} {size.keys} x {dim}" + (", Adagrad" if what == "push" else "")
                unit = "M rows/s"
                figures += [
                    Figure(name, ours, unit, limit=0.6 if dim == 64 else None, ratio=ours / limit),
                    Figure(f"{name}: raw TCP, same bytes", limit, unit),
                    Figure(f"{name}: torch RPC, plain matrix", theirs, unit),
                    Figure(f"{name}: of torch RPC", ours, unit, limit=1.0 if dim == 64 else None, ratio=ours / theirs),
                ]
    return figures
