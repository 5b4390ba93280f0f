"""This project's side of ``bench peers``: the works that peers are measured at, in four contests.

A contest opens what it needs of this project (a shard process, a store, a cluster, a serving process), fills it, and
makes the contenders: this project, and where bytes move, raw TCP that moves as many.

- over the network: ``pull``, ``push`` with Adagrad, as ``bench wire``;
- in one process, one thread on one CPU: ``read``, ``update`` with Adagrad, as ``bench engine``;
- training with one shard process: ``step`` is pull, forward, backward, push with Adagrad;
- serving: ``lookup`` of fewer keys from a published version, as ``bench serving``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...proto.optim import Adagrad
from ...proto.published.model_names import handle_of
from ...proto.published.registry import ModelRegistry
from ...worker.api.connect import connect
from ..launch.local_cluster import local_cluster
from ..launch.local_serving import local_serving
from .harness import Contender, pinned_to_one_cpu
from .processes import FRAME_BYTES, BenchTable, bench_client, raw_tcp, shard_process
from .serving import write_version
from .serving_saturation import TABLE_ID, connection_to
from .wire import Size as WireSize, exchange_of, wire_works

BATCHES = 30
_FILL = 100_000  # rows of an assignment
_LR = 0.01


@dataclass(frozen=True)
class PeerSize:
    """The sizes of a run.

    Attributes:
        rows, keys: the rows of a table, and the unique random keys of a batch.
        dims: the numbers of columns of tables.
        served_rows, served_keys, served_dims: the same of lookups.
        rounds: how often each peer has its turn.
        repetitions, warm_up: how often a turn times a work, after so many that do not count.
        deadline_sec: the seconds that a turn of a peer may take.
        is_judged: whether the figures are held against goals; those of small sizes are not.
    """

    rows: int
    keys: int
    dims: tuple[int, ...]
    served_rows: int
    served_keys: int
    served_dims: tuple[int, ...]
    rounds: int
    repetitions: int
    warm_up: int
    deadline_sec: float
    is_judged: bool = True


FULL = PeerSize(2_000_000, 50_000, (64, 16), 1_000_000, 1_000, (64,), 3, repetitions=7, warm_up=3, deadline_sec=900.0)
QUICK = PeerSize(
    20_000, 2_000, (16,), 5_000, 500, (64,), 3, repetitions=3, warm_up=1, deadline_sec=300.0, is_judged=False
)


@dataclass(frozen=True)
class OurSide:
    """What a contest has opened.

    Attributes:
        ours: makes the contender of this project for a kind and a dim.
        limit: makes the contender that moves the same bytes by raw TCP; None: no bytes move.
    """

    ours: Callable[[str, int], Contender]
    limit: Callable[[str, int], Contender] | None = None


@dataclass(frozen=True)
class Contest:
    """Works that are measured beside each other.

    Attributes:
        title: where the works happen.
        works: what each kind of work is, in words.
        open: opens this project's side.
        rows, keys, dims: the sizes of its tables and batches.
        threads: the threads of a peer; 0: as many as there are CPUs.
        is_pinned: whether all of it runs on one CPU.
        repeats: how many times more repetitions than of other contests are made.
    """

    title: str
    works: dict[str, str]
    open: Callable[[PeerSize], AbstractContextManager[OurSide]]
    rows: Callable[[PeerSize], int] = lambda size: size.rows
    keys: Callable[[PeerSize], int] = lambda size: size.keys
    dims: Callable[[PeerSize], tuple[int, ...]] = lambda size: size.dims
    threads: int = 0
    is_pinned: bool = False
    repeats: int = 1

    def pinned(self) -> AbstractContextManager[object]:
        """Returns a block in which this process runs on one CPU, if the contest asks for it."""
        return pinned_to_one_cpu() if self.is_pinned else nullcontext()

    def cpus(self) -> list[int]:
        """Returns the CPUs that a peer may use; empty: all."""
        return [max(os.sched_getaffinity(0))] if self.is_pinned else []


def batches_of(rows: int, keys: int, dtype: type = np.int64) -> Callable[[], Any]:
    """Returns a function that gives the next of some batches (keys,) of unique random keys, drawn here."""
    random = np.random.default_rng(7)
    return cycle([random.choice(rows, keys, replace=False).astype(dtype) for _ in range(BATCHES)]).__next__


def grads_of(keys: int, dim: int) -> Any:
    """Returns gradients (keys, dim) float32."""
    return np.random.default_rng(8).normal(size=(keys, dim)).astype(np.float32)


@contextmanager
def _over_the_network(size: PeerSize) -> Iterator[OurSide]:
    tables = [BenchTable(f"bench/peers{dim}", dim, size.rows) for dim in size.dims]
    wire = WireSize(table_rows=size.rows, keys=size.keys, dims=size.dims)
    next_keys = batches_of(size.rows, size.keys, np.uint64)
    with shard_process(tables) as port, raw_tcp(size.keys * (8 + 4 * max(size.dims)) + 4096) as raw:
        client = bench_client(port)
        works = {(work.what, work.dim): work for work in wire_works({"TCP": client}, tables, wire)}
        yield OurSide(
            lambda kind, dim: Contender("ours", next_keys, works[kind, dim].runs["TCP"]),
            lambda kind, dim: Contender("raw TCP", lambda: None, partial(exchange_of, raw, works[kind, dim])),
        )


@contextmanager
def _in_one_process(size: PeerSize) -> Iterator[OurSide]:
    from ...cpp_ext import _server

    store = _server.Store()
    next_keys = batches_of(size.rows, size.keys, np.uint64)
    for dim in size.dims:
        optimizer = _server.OptimizerSpec(kind="adagrad")
        store.create_table(_server.TableSchema(id=dim, name=f"rows{dim}", dim=dim, optimizer=optimizer))
        for begin in range(0, size.rows, _FILL):
            keys = np.arange(begin, min(begin + _FILL, size.rows), dtype=np.uint64)
            store.assign(dim, keys, np.full((len(keys), dim), 0.01, np.float32))
    rows = {dim: np.zeros((size.keys, dim), np.float32) for dim in size.dims}
    grads = {dim: grads_of(size.keys, dim) for dim in size.dims}

    def ours(kind: str, dim: int) -> Contender:
        def read(keys: Any) -> None:
            store.pull_into(dim, keys, rows[dim])

        def update(keys: Any) -> None:
            store.apply(dim, keys, grads[dim], lr=_LR)

        return Contender("ours", next_keys, read if kind == "read" else update)

    yield OurSide(ours)


class _Bags(nn.Module):
    """A table of each dim, whose rows are looked up one by one."""

    def __init__(self, rows: int, dims: Sequence[int]) -> None:
        super().__init__()
        self.rows = nn.ModuleDict({f"dim{dim}": nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for dim in dims})

    def forward(self, dim: int, ids: Tensor, offsets: Tensor) -> Tensor:
        found: Tensor = self.rows[f"dim{dim}"](ids, offsets)
        return found


@contextmanager
def _training(size: PeerSize) -> Iterator[OurSide]:
    next_keys = batches_of(size.rows, size.keys)
    offsets = torch.arange(size.keys)
    factors = {dim: torch.from_numpy(grads_of(size.keys, dim)) for dim in size.dims}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with local_cluster(shards=1) as cluster, connect(cluster.address, "bench-peers") as session:
            model = session.distribute(_Bags(size.rows, size.dims), optimizer=Adagrad(lr=_LR), min_rows=1)

            def ours(_: str, dim: int) -> Contender:
                def step(ids: Tensor) -> None:
                    (model(dim, ids, offsets) * factors[dim]).sum().backward()
                    session.step()

                return Contender("ours", lambda: torch.from_numpy(next_keys()), step)

            yield OurSide(ours)
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _serving(size: PeerSize) -> Iterator[OurSide]:
    (dim,) = size.served_dims
    rows = np.random.default_rng(1).standard_normal((size.served_rows, dim)).astype(np.float32)
    next_keys = batches_of(size.served_rows, size.served_keys, np.uint64)
    request_bytes = FRAME_BYTES + 8 * size.served_keys
    reply_bytes = FRAME_BYTES + (4 * dim + 8 + 1) * size.served_keys  # rows, versions, found
    with tempfile.TemporaryDirectory(prefix="sparserow-bench-") as root:
        registry = ModelRegistry(root)
        write_version(registry, rows, "float32")
        registry.point("bench", "live", 1)
        with local_serving("bench", root=root) as serving, raw_tcp(request_bytes + reply_bytes) as raw:
            connection, handle = connection_to(serving, "tcp"), handle_of("bench", 1)

            def look_up(keys: Any) -> object:
                return connection.lookup(handle, [(TABLE_ID, 1, dim, keys)], deadline_ms=10_000)

            yield OurSide(
                lambda *_: Contender("ours", next_keys, look_up),
                lambda *_: Contender("raw TCP", lambda: None, lambda _: raw.exchange(request_bytes, reply_bytes)),
            )


CONTESTS = (
    Contest("network", {"pull": "pull", "push": "push with Adagrad"}, _over_the_network),
    Contest(
        "one process, one thread",
        {"read": "pull", "update": "Adagrad"},
        _in_one_process,
        threads=1,
        is_pinned=True,
    ),
    Contest("training", {"step": "step: pull, forward, backward, Adagrad"}, _training, threads=1),
    Contest(
        "serving",
        {"lookup": "lookup"},
        _serving,
        rows=lambda size: size.served_rows,
        keys=lambda size: size.served_keys,
        dims=lambda size: size.served_dims,
        repeats=20,
    ),
)
