"""The interface of a trainer to its tables and optimizers. ``deploy/train/training_run.py`` chooses the variant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ...proto.config.job import JobConfig
from ...proto.config.train_config import TrainConfig
from ...proto.errors import InvalidArgument
from ..api.session import Session
from ..data import NamedBatch
from ..models import FeatureEmbeddings
from ..session.loss_scale import unscale
from ..session.tracing import Trace
from .parallel_towers import clip_parts

_DENSE_OPTIMIZERS: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


def dense_optimizer(train: TrainConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Makes torch's optimizer of the dense tower. With ``train.parallel.shard``
    "optimizer", its state is spread over the workers.

    Args:
        train: the options of the job's optimizers.
        parameters: the parameters of the dense tower; a model of tables alone has none.

    Raises:
        InvalidArgument: the state is to be spread, with one worker or without parameters.
    """
    config = train.dense_optimizer
    kind = _DENSE_OPTIMIZERS[config.kind]
    made: torch.optim.Optimizer
    if train.parallel is None or train.parallel.shard != "optimizer":
        groups = [{"params": parameters}]  # torch refuses no parameters, and takes a group without any
        made = kind(groups, lr=config.lr, weight_decay=config.weight_decay)
    elif not parameters:
        raise InvalidArgument(
            "train.parallel.shard: optimizer has no effect, as the model has no parameters besides its tables"
        )
    elif dist.is_initialized():
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        made = ZeroRedundancyOptimizer(parameters, kind, lr=config.lr, weight_decay=config.weight_decay)
    else:
        raise InvalidArgument("train.parallel.shard: optimizer needs at least 2 workers; this job has 1")
    return made


OnHost: TypeAlias = Callable[[NamedBatch], tuple[torch.Tensor, ...]]


def keys_on_host(job: JobConfig, model: nn.Module) -> OnHost | None:
    """Returns what names the keys of a batch that only lookups use, so that they need not cross to a device.

    In a model of this package they are those of its tables, but for the items of a task, which a loss compares. A class
    of the user's own may use its keys otherwise; None.

    Args:
        job: the job.
        model: its model.
    """
    if ":" in job.model.class_:
        return None
    embeddings = [each for each in model.modules() if isinstance(each, FeatureEmbeddings)]
    compared = {task.item for task in job.all_tasks}
    names = [name for name in dict.fromkeys(name for each in embeddings for name in each.names) if name not in compared]

    def on_host(batch: NamedBatch) -> tuple[torch.Tensor, ...]:
        features = [part.tensors[name] for part in batch.micro_batches for name in names]
        return tuple(each[0] if isinstance(each, tuple) else each for each in features)

    return on_host


def clip_dense(dense: torch.optim.Optimizer, norm: float, scaler: GradScaler | None) -> None:
    """Clips the total L2 norm of the dense gradients; call it after the allreduce.

    Args:
        dense: the optimizer of the parameters.
        norm: the largest norm.
        scaler: unscales the gradients first; None: they are not scaled.
    """
    if scaler is not None:
        unscale(scaler, dense)
    parameters = [p for group in dense.param_groups for p in group["params"]]
    if any(hasattr(parameter, "to_local") for parameter in parameters):
        clip_parts(parameters, norm)
    else:
        nn.utils.clip_grad_norm_(parameters, norm)


class TrainingBackend(Protocol):
    """A model's tables and both optimizers. Calls come in this order: ``build``, ``start``, then steps.

    A new variant needs a file with this interface, a value of ``model.backend``, and a case in
    ``deploy/train/training_run.py``.
    """

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Returns the model on this backend.

        Args:
            make: builds the model in plain torch.
        """
        ...

    def start(self, model: nn.Module) -> None:
        """Makes the optimizers of the built model."""
        ...

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers whose ``lr`` follows the schedule: those of the dense tower and of the tables."""
        ...

    @property
    def dense(self) -> torch.optim.Optimizer | None:
        """The optimizer of the dense tower; None when the tower is on the servers."""
        ...

    def batches(self, reader: Iterable[NamedBatch]) -> Iterable[NamedBatch]:
        """Returns the batches of the training reader, one for each step; each ``iter()`` is an epoch.

        It is called after ``build``.
        """
        ...

    @property
    def forwards_meet(self) -> bool:
        """Whether a forward has collective calls, so that each rank makes equally many. It is known after ``build``."""
        ...

    @property
    def on_host(self) -> OnHost | None:
        """Names the tensors of a batch that stay on the host; None: every one crosses. It is known after ``build``."""
        ...

    @property
    def session(self) -> Session | None:
        """The session with the cluster; None without a cluster."""
        ...

    @property
    def trace(self) -> Trace:
        """The trace that receives the spans of steps."""
        ...

    def step(self, scaler: GradScaler | None) -> bool:
        """Ends a step: applies all gradients since the last step or none, clipped as the job says, and clears them.

        Args:
            scaler: the scaler of the loss; None: the loss is not scaled.

        Returns:
            Whether the step was taken; every rank gets the same value.

        Raises:
            NonFiniteGradient: a gradient has NaN or Inf. With a scaler or ``on_nonfinite`` "skip" it is not raised.
        """
        ...

    def passed_over(self) -> int | None:
        """Is called after a step that was not taken, and returns how many more steps the job has made without it.

        The result is None unless the step had its quorum without this worker (``train.quorum``).
        """
        ...

    def settle(self, *, is_end: bool) -> None:
        """Is called before an evaluation: waits for the steps of other workers that have no process group.

        Args:
            is_end: whether the job is at its end, so that rank 0 waits for all steps. Otherwise the wait is that of a
                pull under the job's clock.
        """
        ...

    def staleness(self) -> dict[str, dict[str, int]]:
        """Returns the staleness of each table's pulls; see ``TrainResult.staleness``."""
        ...

    def untrained(self) -> list[str]:
        """Returns the tables of the job that have no row after its training."""
        ...

    def empty_frozen(self) -> list[str]:
        """Returns the frozen tables that have no row."""
        ...

    def shard_losses(self) -> tuple[int, int]:
        """Returns ``TrainResult.shard_restores`` and ``TrainResult.commits_lost``."""
        ...

    def cache(self) -> dict[str, int]:
        """Returns the counts of this worker's row cache (``TrainResult.cache``); {} without a cache."""
        ...

    def quorum(self) -> dict[str, int]:
        """Returns the counts of this worker's steps without it (``TrainResult.quorum``); {} without a quorum."""
        ...

    def tiers(self) -> dict[str, float]:
        """Returns the counts of shards with an SSD since this backend was made (``TrainResult.tiers``).

        The result is {} when no shard has an SSD.
        """
        ...

    def rows(self) -> int:
        """Returns the number of rows that exist in all tables of the job."""
        ...

    @property
    def shards(self) -> int:
        """The number of shards that hold the rows; 0 when there are no servers."""
        ...
