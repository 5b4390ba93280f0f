"""The rules of ``train.quorum``, by which a step has fewer members than the job has workers."""

from __future__ import annotations

from ..errors import not_allowed
from .train_config import TrainConfig


def check_members(train: TrainConfig, workers: int) -> None:
    """Raises InvalidArgument when the quorum is larger than the number of workers that the job has."""
    if train.quorum is not None and train.quorum > workers:
        raise not_allowed("train.quorum", train.quorum, f"1 to {workers} (the workers of the job), or null")
