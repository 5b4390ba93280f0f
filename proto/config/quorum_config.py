"""The rules of ``train.quorum``, by which a step has fewer members than the job has workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InvalidArgument, not_allowed

if TYPE_CHECKING:
    from .job import TrainConfig


def check_quorum(train: TrainConfig) -> None:
    """Raises InvalidArgument unless the other settings of ``train`` allow its quorum; None is allowed beside all."""
    if train.quorum is None:
        return
    if train.dense != "ps":
        raise InvalidArgument(
            f"train.quorum: needs train.dense ps, as an allreduce waits for every worker; train.dense is {train.dense}"
        )
    if train.staleness != 0:
        staleness = "null" if train.staleness is None else train.staleness
        raise InvalidArgument(
            f"train.quorum: needs train.staleness 0, as no step is reduced otherwise; train.staleness is {staleness}"
        )
    if train.prefetch:
        raise InvalidArgument(
            f"train.prefetch: {train.prefetch} is not possible with train.quorum, as a worker may pass over batches; "
            "allowed: 0"
        )
    if train.elastic is not None:
        raise InvalidArgument(
            "train.elastic: is not possible with train.quorum, as its leases need staleness; allowed: null"
        )
    if train.checkpoint is not None and train.checkpoint.every_seconds is not None:
        raise InvalidArgument(
            "train.checkpoint.every_seconds: is not possible with train.quorum, as all workers save after the same "
            "step; allowed: null, with every_steps"
        )


def check_members(train: TrainConfig, workers: int) -> None:
    """Raises InvalidArgument when the quorum is larger than the number of workers that the job has."""
    if train.quorum is not None and train.quorum > workers:
        raise not_allowed("train.quorum", train.quorum, f"1 to {workers} (the workers of the job), or null")
