"""The model with its tables on parameter servers: the public face, as any author would use it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ..proto.control import ControlClient
from ..proto.errors import FailedPrecondition
from ..proto.job import JobConfig
from ..proto.schema import Table, Uniform
from .deferred import deferred
from .distribute import distribute
from .session import Session
from .training_backend import clip_dense, dense_optimizer


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
        self._dense = dense_optimizer(self._job.train, list(model.parameters()))

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The dense one, and the session's with the rates of the tables."""
        return self._started(), self._session.optimizer

    def step(self, scaler: GradScaler | None) -> bool:
        """One commit: dense update and sparse rows, or neither. An empty batch commits nothing but takes part."""
        dense, train = self._started(), self._job.train
        if train.clip_norm is not None:
            clip_dense(dense, train.clip_norm, scaler)
        return self._session.step(dense, scaler, allow_empty=True, clip_row_norm=train.clip_row_norm)

    def _started(self) -> torch.optim.Optimizer:
        if self._dense is None:
            raise FailedPrecondition("PsBackend: call start first")
        return self._dense

    def rows(self) -> int:
        """Rows that the servers hold for this job's namespace."""
        with ControlClient(self._coordinator) as client:
            return sum(usage.rows for shard in client.status().shards for usage in shard.tables)
