"""The model that ``bench train`` trains: pooled embeddings, its batches, and its step in torch and over shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ...proto.optim import Adagrad
from ...proto.schema import Constant, Table
from ...worker.api.session import Session

TABLES = 26
DIM = 16
ZIPF = 1.05
HIDDEN = 64


@dataclass(frozen=True)
class Size:
    """The rows of each table, samples of a batch, ids of a bag in each case, and repetitions."""

    rows: int
    batch: int
    hot: tuple[int, ...]
    repetitions: int


FULL = Size(rows=100_000, batch=4096, hot=(1, 10), repetitions=50)
QUICK = Size(rows=1_000, batch=64, hot=(3,), repetitions=3)


class PooledClickModel(nn.Module):
    """A model of 26 pooled embeddings, then an MLP 64-64."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for _ in range(TABLES))
        self.mlp = mlp_of_click_model()

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits (batch) of ids (tables, batch, hot) int64."""
        pooled = [table(ids[index]) for index, table in enumerate(self.tables)]
        logits: Tensor = self.mlp(torch.cat(pooled, dim=1))
        return logits.squeeze(1)


def mlp_of_click_model() -> nn.Sequential:
    """Returns the dense tower, from the pooled rows of all tables (batch, tables * dim) to logits (batch, 1)."""
    return nn.Sequential(
        nn.Linear(TABLES * DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
    )


@dataclass
class CpuClock:
    """The CPU seconds that a process uses while steps run."""

    now: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    _begin: float = 0.0

    def start(self) -> None:
        """Notes the CPU time before a step."""
        self._begin = self.now()

    def stop(self) -> None:
        """Notes the CPU time after a step."""
        self.seconds.append(self.now() - self._begin)

    def mean_ms(self, repetitions: int) -> float:
        """Returns the CPU milliseconds per step over the last ``repetitions``; process clocks are too coarse for a
        median.
        """
        return sum(self.seconds[-repetitions:]) / repetitions * 1000


class ZipfBatches:
    """New batches of ids, Zipf-distributed and scattered over each table, with random labels."""

    def __init__(self, size: Size, hot: int) -> None:
        weights = np.arange(1, size.rows + 1, dtype=np.float64) ** -ZIPF
        self._cumulative = np.cumsum(weights) / weights.sum()
        self._random = np.random.default_rng(17)
        self._scattered = self._random.permutation(size.rows)
        self._shape = (TABLES, size.batch, hot)

    def make(self) -> tuple[Tensor, Tensor]:
        """Returns ids (tables, batch, hot) int64, and labels (batch) float32."""
        ranks = np.searchsorted(self._cumulative, self._random.random(self._shape))
        ids = self._scattered[np.minimum(ranks, len(self._scattered) - 1)]
        return torch.from_numpy(ids), torch.from_numpy(self._random.integers(0, 2, self._shape[1]).astype(np.float32))


def torch_step(size: Size) -> Callable[[tuple[Tensor, Tensor]], None]:
    """Returns a function that makes a training step in torch alone."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, set explicitly because Adagrad warns otherwise
    model = PooledClickModel(size.rows)
    sparse = torch.optim.Adagrad(model.tables.parameters(), lr=0.05)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        sparse.zero_grad()
        dense.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1]).backward()
        sparse.step()
        dense.step()

    return step


def distributed_step(size: Size, session: Session) -> Callable[[tuple[Tensor, Tensor]], None]:
    """Returns a function that makes a training step of the same model, with its tables in the session's shards."""
    model = session.distribute(
        PooledClickModel(size.rows),
        optimizer=Adagrad(lr=0.05),
        min_rows=1,
        tables={"*": Table(init=Constant(0.01))},
    )
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1]).backward()
        session.step(dense)

    return step
