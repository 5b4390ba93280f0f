"""Where a trainer's tables live: one interface, one file a variant, one factory (``trainer.open_backend``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ...proto.config.job import TrainConfig
from ...proto.errors import InvalidArgument
from ..data import Batch
from ..session.session import Session
from ..session.tracing import Trace

_DENSE_OPTIMIZERS: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


def dense_optimizer(train: TrainConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer of the dense tower, its state spread over the workers where ``train.zero`` says so.

    Raises:
        InvalidArgument: ``train.zero`` with one worker.
    """
    config = train.dense_optimizer
    kind = _DENSE_OPTIMIZERS[config.kind]
    made: torch.optim.Optimizer
    if not train.zero:
        made = kind(parameters, lr=config.lr, weight_decay=config.weight_decay)
    elif dist.is_initialized():
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        made = ZeroRedundancyOptimizer(parameters, kind, lr=config.lr, weight_decay=config.weight_decay)
    else:
        raise InvalidArgument("train.zero: true needs at least 2 workers; this job has 1")
    return made


def clip_dense(dense: torch.optim.Optimizer, norm: float, scaler: GradScaler | None) -> None:
    """Clips the gradients' total L2 norm, unscaled where there is a scaler; call it after the allreduce."""
    if scaler is not None:
        scaler.unscale_(dense)
    nn.utils.clip_grad_norm_([p for group in dense.param_groups for p in group["params"]], norm)


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

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those whose ``lr`` schedules move; of the dense tower and of the tables."""
        ...

    @property
    def dense(self) -> torch.optim.Optimizer | None:
        """The optimizer of the dense tower; None where that is on the servers."""
        ...

    def batches(self, reader: Iterable[Batch]) -> Iterable[Batch]:
        """The training reader's batches, one a step; each ``iter()`` is an epoch. After ``build``."""
        ...

    @property
    def session(self) -> Session | None:
        """Of the cluster; None without one."""
        ...

    @property
    def trace(self) -> Trace:
        """Where the spans of steps go."""
        ...

    def step(self, scaler: GradScaler | None) -> bool:
        """Ends a step: applies the gradients since the last one, clipped as the job says, or none, and clears them.

        Returns:
            Whether it was taken; on every rank the same.

        Raises:
            NonFiniteGradient: a gradient has NaN or Inf; not with a scaler or ``on_nonfinite`` skip.
        """
        ...

    def settle(self, *, is_end: bool) -> None:
        """Before an evaluation: waits for peers that never meet, as far as the clock says, or at the job's end."""
        ...

    def staleness(self) -> dict[str, dict[str, int]]:
        """How stale the pulls of each table were, as ``TrainResult`` says."""
        ...

    def shard_losses(self) -> tuple[int, int]:
        """How often shards came back from a checkpoint alone, and commits lost by it (``TrainResult``)."""
        ...

    def cache(self) -> dict[str, int]:
        """What this worker's row cache did (``TrainResult.cache``); {} without one."""
        ...

    def tiers(self) -> dict[str, float]:
        """What shards with an SSD did since this backend was made (``TrainResult.tiers``); {} without one."""
        ...

    def rows(self) -> int:
        """Rows of all tables that were ever updated; on every rank the same."""
        ...

    @property
    def shards(self) -> int:
        """Parameter servers that hold them; 0 for none."""
        ...
