"""Where a trainer's tables live: one interface, one file a variant, one factory (``trainer.open_backend``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from ..proto.job import DenseOptimizerConfig

_DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


def dense_optimizer(config: DenseOptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer of the dense tower."""
    return _DENSE_OPTIMIZERS[config.kind](parameters, lr=config.lr, weight_decay=config.weight_decay)


class TrainingBackend(Protocol):
    """A model's tables and both optimizers. Calls come in this order: ``build``, ``start``, then steps.

    To add a variant: a file with this interface, a value of ``model.backend``, a case in the factory.
    """

    def build(self, make: Callable[[bool], nn.Module]) -> nn.Module:
        """The model on this backend; ``make(sparse)`` builds it in plain torch."""
        ...

    def start(self, model: nn.Module) -> None:
        """Makes the optimizers of the built model."""
        ...

    def step(self) -> None:
        """Ends a step: applies the gradients of the last backward and clears them."""
        ...

    def scale_learning_rates(self, factor: float) -> None:
        """Multiplies both learning rates."""
        ...

    def rows(self) -> int:
        """Rows of all tables that were ever updated; on every rank the same."""
        ...

    @property
    def shards(self) -> int:
        """Parameter servers that hold them; 0 for none."""
        ...
