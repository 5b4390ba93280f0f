"""The backend that trains in torch alone, without servers; distributed runs are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ...proto.config.optimizer_config import AdagradConfig, SgdConfig
from ...proto.config.train_config import TrainConfig
from ...proto.errors import FailedPrecondition
from ..data import NamedBatch
from ..session.dense_optimizer import has_nonfinite
from ..session.loss_scale import LossScale
from ..session.step import NonFiniteGradient
from ..session.tracing import NoTrace, Trace
from .local_row_optimizer import LocalRowOptimizer
from .table_average import average_gradients, leave_to_average
from .training_backend import clip_dense, dense_optimizer


class LocalBackend:
    """A backend whose tables are local ``nn.Embedding`` layers with sparse gradients.

    SGD and Adagrad are torch's own; the other row optimizers are those of :class:`LocalRowOptimizer`.

    Args:
        train: the options of the job's steps and optimizers.
        min_rows: the least number of rows of an embedding layer that is a table.
        trace: the trace that receives the spans of steps; None: no spans are kept.
    """

    shards = 0
    forwards_meet = False
    session = None
    on_host = None

    def __init__(self, train: TrainConfig, min_rows: int = 1, trace: Trace | None = None) -> None:
        self._min_rows = min_rows
        self._train, self.trace = train, trace or NoTrace()
        self._tables: list[nn.Embedding | nn.EmbeddingBag] = []
        self._dense: torch.optim.Optimizer | None = None
        self._rows: torch.optim.Optimizer | None = None

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Returns the model unchanged, with sparse gradients, which :meth:`step` averages over ranks."""
        model = make()
        self._tables = _tables_of(model, self._min_rows)
        for table in self._tables:
            table.sparse = True
        leave_to_average(model, self._tables)
        return model

    def start(self, model: nn.Module) -> None:
        """Makes an optimizer for the tables and another for all other parameters."""
        weights = self._weights()
        in_tables = {id(weight) for weight in weights}
        others = [p for p in model.parameters() if id(p) not in in_tables]
        self._dense, self._rows = dense_optimizer(self._train, others), self._row_optimizer(weights)

    @property
    def dense(self) -> torch.optim.Optimizer | None:
        """The optimizer of all parameters but the tables."""
        return self._dense

    def batches(self, reader: Iterable[NamedBatch]) -> Iterable[NamedBatch]:
        """Returns the reader itself."""
        return reader

    def _weights(self) -> list[nn.Parameter]:
        """Returns the weights of the tables; one that several layers share is there once."""
        return list({id(table.weight): cast(nn.Parameter, table.weight) for table in self._tables}.values())

    def _row_optimizer(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns torch's optimizer where it moves single rows; else the servers' by torch's operations."""
        rows = self._train.row_optimizer
        has_decay = rows.weight_decay > 0
        if isinstance(rows, SgdConfig) and not has_decay and rows.momentum == 0:
            return torch.optim.SGD(weights, lr=rows.lr)
        if isinstance(rows, AdagradConfig) and not has_decay and rows.accumulator_decay == 1:
            return torch.optim.Adagrad(
                weights, lr=rows.lr, eps=rows.eps, initial_accumulator_value=rows.initial_accumulator
            )
        return LocalRowOptimizer(weights, rows.row_optimizer())

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """The optimizer of the dense side, and that of the tables."""
        if self._dense is None or self._rows is None:
            raise FailedPrecondition("LocalBackend: call start first")
        return self._dense, self._rows

    def step(self, scaler: GradScaler | None) -> bool:
        """Steps both optimizers or neither, and then clears the gradients.

        DDP has averaged the dense gradients over the ranks before.
        """
        dense, rows = self.optimizers
        with torch.sparse.check_sparse_tensor_invariants(False):  # torch warns unless this is set explicitly
            if dist.is_initialized():
                average_gradients(self._weights())
            if self._train.clip_norm is not None:
                clip_dense(dense, self._train.clip_norm, scaler)
            try:
                return self._step_plain(dense, rows) if scaler is None else _step_scaled(dense, rows, scaler)
            finally:
                for optimizer in (dense, rows):
                    optimizer.zero_grad()

    def _step_plain(self, dense: torch.optim.Optimizer, rows: torch.optim.Optimizer) -> bool:
        if has_nonfinite(dense) or has_nonfinite(rows):
            if self._train.on_nonfinite == "raise":
                raise NonFiniteGradient("a gradient is not finite; the step was refused and nothing was applied")
            return False
        dense.step()
        rows.step()
        return True

    def passed_over(self) -> None:
        """Returns None, as every worker takes part in each step."""

    def settle(self, *, is_end: bool) -> None:
        """Does nothing: there are no servers, and the workers synchronise in each step."""

    def untrained(self) -> list[str]:
        """Returns no table: each has all of its rows."""
        return []

    def empty_frozen(self) -> list[str]:
        """Returns no table, as for :meth:`untrained`."""
        return []

    def shard_losses(self) -> tuple[int, int]:
        """Returns (0, 0), as there are no shards."""
        return 0, 0

    def staleness(self) -> dict[str, dict[str, int]]:
        """Returns {}, as there are no pulls."""
        return {}

    def cache(self) -> dict[str, int]:
        """Returns {}, as there is no row cache."""
        return {}

    def quorum(self) -> dict[str, int]:
        """Returns {}, as every worker takes part in each step."""
        return {}

    def tiers(self) -> dict[str, float]:
        """Returns {}, as there are no servers."""
        return {}

    def rows(self) -> int:
        """Returns the number of rows of all tables; torch allocates every row."""
        return sum(weight.shape[0] for weight in self._weights())


def _tables_of(model: nn.Module, min_rows: int) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Returns the embedding layers that are trained and that torch can give sparse gradients."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        and layer.num_embeddings >= min_rows
        and layer.weight.requires_grad
        and getattr(layer, "mode", "sum") != "max"
    ]


def _step_scaled(dense: torch.optim.Optimizer, rows: torch.optim.Optimizer, scaler: GradScaler) -> bool:
    scale = LossScale(scaler)
    is_bad = any([scale.unscale(dense), scale.unscale(rows)])  # a list, so that both are unscaled
    if not is_bad:
        rows.step()
    scale.finish(dense, rows, skip=is_bad)
    return not is_bad
