"""The model in plain torch: what a distributed run is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..proto.job import AdagradConfig, SgdConfig, TrainConfig
from .models import HashedEmbeddings
from .training_backend import dense_optimizer


class LocalBackend:
    """Tables are local ``nn.Embedding`` layers with sparse gradients and torch's own optimizers."""

    shards = 0

    def __init__(self, train: TrainConfig) -> None:
        self._train = train
        self._tables: list[nn.Embedding] = []
        self._optimizers: list[torch.optim.Optimizer] = []

    def build(self, make: Callable[[bool], nn.Module]) -> nn.Module:
        """The model as it is, with sparse gradients."""
        return make(True)

    def start(self, model: nn.Module) -> None:
        """An optimizer of the tables and one of all else."""
        holders = (module for module in model.modules() if isinstance(module, HashedEmbeddings))
        self._tables = [table for h in holders for table in h.tables.values() if isinstance(table, nn.Embedding)]
        weights: list[torch.Tensor] = [table.weight for table in self._tables]
        in_tables = {id(weight) for weight in weights}
        others = [p for p in model.parameters() if id(p) not in in_tables]
        self._optimizers = [dense_optimizer(self._train.dense_optimizer, others), self._row_optimizer(weights)]

    def _row_optimizer(self, weights: list[torch.Tensor]) -> torch.optim.Optimizer:
        rows = self._train.row_optimizer
        if isinstance(rows, SgdConfig):
            return torch.optim.SGD(weights, lr=rows.lr, momentum=rows.momentum)
        assert isinstance(rows, AdagradConfig), "JobConfig allows no other with this backend"
        return torch.optim.Adagrad(
            weights, lr=rows.lr, eps=rows.eps, initial_accumulator_value=rows.initial_accumulator
        )

    def step(self) -> None:
        """Both optimizers, then clears the gradients."""
        with torch.sparse.check_sparse_tensor_invariants(False):  # torch's own gradients; it warns when not told
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def scale_learning_rates(self, factor: float) -> None:
        """Of both optimizers."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= factor

    def rows(self) -> int:
        """Rows of the tables; torch allocates them all."""
        return sum(table.num_embeddings for table in self._tables)
