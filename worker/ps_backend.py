"""The model with its tables on parameter servers: the public face, as any author would use it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..proto.control import ControlClient
from ..proto.errors import FailedPrecondition
from ..proto.job import JobConfig
from ..proto.schema import Table, Uniform
from .deferred import deferred
from .distribute import distribute
from .session import Session
from .training_backend import dense_optimizer


class PsBackend:
    """Tables of at least ``model.min_rows`` rows live on the cluster; they are never allocated here.

    Args:
        job: model, optimizers, seed.
        session: of the job's namespace; the caller closes it.
        coordinator: ``HOST:PORT``, asked for figures at the end.
    """

    def __init__(self, job: JobConfig, session: Session, coordinator: str) -> None:
        self._job, self._session, self._coordinator = job, session, coordinator
        self._dense: torch.optim.Optimizer | None = None
        with ControlClient(coordinator) as client:
            self.shards = len(client.status().shards)

    def build(self, make: Callable[[bool], nn.Module]) -> nn.Module:
        """Builds with deferred tables and swaps them for distributed ones.

        Raises:
            FailedPrecondition: the cluster holds a table of that name with another schema.
        """
        model, train = self._job.model, self._job.train
        with deferred(min_rows=model.min_rows):
            plain = make(False)
        initial = Uniform(-model.init_scale, model.init_scale)
        return distribute(
            plain,
            self._session,
            optimizer=train.row_optimizer.row_optimizer(),
            min_rows=model.min_rows,
            tables={"*": Table(init=initial, seed=train.seed)},
        )

    def start(self, model: nn.Module) -> None:
        """An optimizer of what is not on the servers."""
        self._dense = dense_optimizer(self._job.train.dense_optimizer, list(model.parameters()))

    def step(self) -> None:
        """One commit: dense update and sparse rows, or neither. An empty batch commits nothing but takes part."""
        if self._dense is None:
            raise FailedPrecondition("PsBackend.step: call start first")
        self._session.step(self._dense, allow_empty=True)

    def scale_learning_rates(self, factor: float) -> None:
        """Of the dense optimizer and of every table."""
        for optimizer in (self._dense, self._session.optimizer):
            for group in optimizer.param_groups if optimizer is not None else ():
                group["lr"] *= factor

    def rows(self) -> int:
        """Rows that the servers hold for this job's namespace."""
        with ControlClient(self._coordinator) as client:
            return sum(usage.rows for shard in client.status().shards for usage in shard.tables)
