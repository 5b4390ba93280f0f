"""A part of ``bench train``: a step of one layer of unique ids, whose cost is that of moving and updating rows.

One layer looks up 50,000 unique ids of two million rows of 64 columns, new ones each step; its loss is the sum of the
rows times a constant, so that nothing but the layer takes time. The step pulls the rows from one shard process, runs
forward and backward, and pushes to Adagrad. The reference is the same layer in torch: ``nn.EmbeddingBag(sparse=True)``
with ``torch.optim.Adagrad``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor, nn

from ...proto.optim import Adagrad
from ...proto.schema import Constant, Table
from ...worker.api.connect import connect
from ...worker.api.session import Session
from ..launch.local_cluster import local_cluster
from .harness import Contender, Figure, median, time_in_turns

_BATCHES = 12
_LIMIT = 4.0  # M rows/s
_LIMIT_OF_TCP = 1.4


@dataclass(frozen=True)
class LayerSize:
    """The rows and columns of the layer, ids of a step, and repetitions."""

    rows: int = 2_000_000
    dim: int = 64
    ids: int = 50_000
    repetitions: int = 40


FULL = LayerSize()
QUICK = LayerSize(rows=20_000, dim=16, ids=2_000, repetitions=9)


def measure_one_layer(size: LayerSize) -> list[Figure]:
    """Returns M rows/s of the step over one shard process by both transports, and in torch."""
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randperm(size.rows, generator=generator)[: size.ids].view(-1, 1) for _ in range(_BATCHES)]
    grad = torch.full((size.ids, size.dim), 0.01)
    with (
        local_cluster(shards=1) as cluster,
        connect(cluster.address, "bench-layer-tcp", transport="tcp") as over_tcp,
        connect(cluster.address, "bench-layer", transport="shm") as session,
    ):
        steps = [_distributed_step(size, each, grad) for each in (over_tcp, session)]
        for keys in torch.arange(size.rows).split(size.ids):  # rows begin here, and not in the measurement
            if len(keys) == size.ids:
                for step in steps:
                    step(keys.view(-1, 1))
        next_ids = cycle(batches).__next__
        contenders = [
            Contender("one shard by TCP", next_ids, steps[0]),
            Contender("one shard", next_ids, steps[1]),
            Contender("torch", next_ids, _torch_step(size, grad)),
        ]
        timed = time_in_turns(contenders, repetitions=size.repetitions)
    name = f"train: one layer of {size.rows} x {size.dim}, {size.ids} ids"
    tcp, shared, plain = (size.ids / median(seconds) / 1e6 for seconds in timed)
    ours = f"{name}: pull, backward, Adagrad push"
    return [
        Figure(f"{ours} by TCP", tcp, "M rows/s"),
        Figure(f"{ours}, shared memory", shared, "M rows/s", _LIMIT, shared),
        Figure(f"{ours}, shared memory, of TCP", shared, "M rows/s", _LIMIT_OF_TCP, shared / tcp),
        Figure(f"{name}: torch EmbeddingBag(sparse=True)", plain, "M rows/s"),
    ]


def _layer(size: LayerSize) -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(size.rows, size.dim, mode="sum", sparse=True))


def _distributed_step(size: LayerSize, session: Session, grad: Tensor) -> Callable[[Tensor], None]:
    model = session.distribute(
        _layer(size), optimizer=Adagrad(lr=0.05), min_rows=1, tables={"*": Table(init=Constant(0.01))}
    )

    def step(ids: Tensor) -> None:
        model(ids).backward(grad)
        session.step()

    return step


def _torch_step(size: LayerSize, grad: Tensor) -> Callable[[Tensor], None]:
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, set explicitly because Adagrad warns otherwise
    model = _layer(size)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        model(ids).backward(grad)
        optimizer.step()

    return step
