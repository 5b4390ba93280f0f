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
    """Returns M rows/s of the step over one shard process and in torch."""
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randperm(size.rows, generator=generator)[: size.ids].view(-1, 1) for _ in range(_BATCHES)]
    grad = torch.full((size.ids, size.dim), 0.01)
    with local_cluster(shards=1) as cluster, connect(cluster.address, "bench-layer") as session:
        ours = _distributed_step(size, session, grad)
        for keys in torch.arange(size.rows).split(size.ids):  # rows are born here, and not in the measurement
            if len(keys) == size.ids:
                ours(keys.view(-1, 1))
        next_ids = cycle(batches).__next__
        contenders = [
            Contender("one shard", next_ids, ours),
            Contender("torch", next_ids, _torch_step(size, grad)),
        ]
        shard_sec, torch_sec = map(median, time_in_turns(contenders, repetitions=size.repetitions))
    name = f"train: one layer of {size.rows} x {size.dim}, {size.ids} ids"
    rates = [size.ids / seconds / 1e6 for seconds in (shard_sec, torch_sec)]
    return [
        Figure(f"{name}: pull, backward, Adagrad push", rates[0], "M rows/s", _LIMIT, rates[0]),
        Figure(f"{name}: torch EmbeddingBag(sparse=True)", rates[1], "M rows/s"),
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
