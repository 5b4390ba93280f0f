"""``bench train``: measures a step of a recommendation model against torch's own sparse training, and against no
network.

The same model runs four times: as ``nn.EmbeddingBag(sparse=True)`` with ``torch.optim.Adagrad``; distributed over one
shard process on this machine, by TCP and through shared memory; and distributed over a store of this process. They take
turns on new batches. CPU times
are those of whole processes, over the measured steps. Then it runs with prefetch (``prefetched.py``). One layer alone
(``one_layer.py``) and a batch of one sample follow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...worker.api.connect import connect
from ...worker.api.in_process import InProcessCluster
from ...worker.api.session import Session
from ..launch.local_cluster import LocalCluster, local_cluster
from .click_model import (
    DIM,
    FULL,
    QUICK,
    TABLES,
    CpuClock,
    PooledClickModel,
    Size,
    ZipfBatches,
    distributed_step,
    torch_step,
)
from .harness import Contender, Figure, median, process_cpu, time_in_turns
from .one_layer import FULL as LAYER_FULL, QUICK as LAYER_QUICK, measure_one_layer
from .prefetched import measure_prefetch

__all__ = ["FULL", "QUICK", "run_train"]

LIMIT_OF_TORCH = 1.15
LIMIT_OF_IN_PROCESS = 0.97
LIMIT_BEYOND_DENSE_MS = 0.3


@contextmanager
def sessions(hot: int) -> Iterator[tuple[LocalCluster, Session, Session, Session]]:
    """Yields one shard process with a session by TCP and one through shared memory, and one over a store of this
    process.
    """
    with (
        local_cluster(shards=1) as cluster,
        connect(cluster.address, f"bench-{hot}-tcp", transport="tcp") as over_tcp,
        connect(cluster.address, f"bench-{hot}", transport="shm") as remote,
        InProcessCluster().connect(f"bench-{hot}-local") as local,
    ):
        yield cluster, over_tcp, remote, local


def run_train(size: Size) -> list[Figure]:
    """Returns all figures; see the docstring of the module."""
    figures: list[Figure] = []
    for hot in size.hot:
        with sessions(hot) as (cluster, over_tcp, remote, local):
            figures += _measure(size, hot, cluster, over_tcp, remote, local)
        figures += measure_prefetch(size, hot)
    layer = LAYER_QUICK if size is QUICK else LAYER_FULL
    return [*figures, *measure_one_layer(layer), *_fixed_cost(size)]


def _measure(
    size: Size, hot: int, cluster: LocalCluster, over_tcp: Session, remote: Session, local: Session
) -> list[Figure]:
    worker, server = CpuClock(time.process_time), CpuClock(lambda: process_cpu(cluster.shard_pids[0]))
    over_rpc = distributed_step(size, remote)

    def clocked(batch: tuple[Tensor, Tensor]) -> None:
        worker.start()
        server.start()
        over_rpc(batch)
        worker.stop()
        server.stop()

    batches = ZipfBatches(size, hot)
    contenders = [
        Contender("torch", batches.make, torch_step(size)),
        Contender("one shard by TCP", batches.make, distributed_step(size, over_tcp)),
        Contender("one shard", batches.make, clocked),
        Contender("in-process", batches.make, distributed_step(size, local)),
    ]
    timed = time_in_turns(contenders, repetitions=size.repetitions)
    name = f"train {hot}-hot, {TABLES} tables, batch {size.batch}"
    rates = dict(zip(("torch", "tcp", "rpc", "in"), (size.batch / median(seconds) for seconds in timed), strict=True))
    unit = "samples/s"
    return [
        Figure(f"{name}: torch EmbeddingBag(sparse=True)", rates["torch"], unit),
        Figure(f"{name}: one shard by TCP, of torch", rates["tcp"], unit, None, rates["tcp"] / rates["torch"]),
        Figure(f"{name}: one shard, of torch", rates["rpc"], unit, LIMIT_OF_TORCH, rates["rpc"] / rates["torch"]),
        Figure(f"{name}: in-process, of torch", rates["in"], unit, None, rates["in"] / rates["torch"]),
        Figure(
            f"{name}: one shard, of in-process", rates["rpc"], unit, LIMIT_OF_IN_PROCESS, rates["rpc"] / rates["in"]
        ),
        Figure(f"{name}: worker CPU", worker.mean_ms(size.repetitions), "ms/step", higher_is_better=False),
        Figure(f"{name}: server CPU", server.mean_ms(size.repetitions), "ms/step", higher_is_better=False),
    ]


def _fixed_cost(size: Size) -> list[Figure]:
    """Measures what a step costs however small its batch is: Python and dispatch, beside the step of the MLP alone."""
    one = Size(rows=size.rows, batch=1, hot=(1,), repetitions=size.repetitions)
    model = PooledClickModel(2)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)

    def dense_step(batch: tuple[Tensor, Tensor]) -> None:
        logits = model.mlp(torch.zeros(1, TABLES * DIM)).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, batch[1]).backward()
        dense.step()
        dense.zero_grad()

    batches = ZipfBatches(one, 1)
    with InProcessCluster().connect("bench-fixed") as session:
        contenders = [
            Contender("dense alone", batches.make, dense_step),
            Contender("26 tables", batches.make, distributed_step(one, session)),
        ]
        dense_sec, step_sec = map(median, time_in_turns(contenders, repetitions=size.repetitions))
    name = f"train: Python and dispatch of {TABLES} tables, batch 1"
    return [
        Figure(f"{name}: whole step", step_sec * 1000, "ms/step", higher_is_better=False),
        Figure(f"{name}: dense part alone", dense_sec * 1000, "ms/step", higher_is_better=False),
        Figure(
            f"{name}: beyond the dense part",
            (step_sec - dense_sec) * 1000,
            "ms/step",
            limit=LIMIT_BEYOND_DENSE_MS,
            higher_is_better=False,
        ),
    ]
