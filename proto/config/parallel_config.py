"""The section ``train.parallel`` of a job file, and the numbers of processes that it allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from ..errors import InvalidArgument, not_allowed
from ..options.strict_model import StrictModel


class ParallelConfig(StrictModel):
    """How processes share one dense tower. Processes that share a batch are one worker, and are called a group."""

    shard: Literal["optimizer", "all"] | None = Field(
        None,
        description="What of the dense tower is sharded over the groups. optimizer: its optimizer's state (ZeRO-1), of "
        "any model. all: its weights and gradients as well (FSDP2). null: nothing.",
    )
    tensor: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes of a group, which split the hidden layers of the MLPs (tensor parallelism). It divides "
        "the number of processes.",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_pipeline(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "pipeline" in value:
            raise InvalidArgument(
                "pipeline: pipeline parallelism is not possible, as its stages read different layers of one batch at "
                "different times, while a step pulls and commits the rows of all layers at once; allowed: shard, tensor"
            )
        return value

    @model_validator(mode="after")
    def _has_an_effect(self) -> ParallelConfig:
        if self.shard is None and self.tensor == 1:
            raise InvalidArgument(
                "has no effect with shard null and tensor 1; allowed: shard optimizer or all, tensor >= 2, or null"
            )
        if self.shard == "optimizer" and self.tensor > 1:
            raise InvalidArgument("shard: optimizer is not possible with tensor; allowed: all, or null")
        return self

    @property
    def has_parts(self) -> bool:
        """Whether no process has the whole tower."""
        return self.shard == "all" or self.tensor > 1


def check_ranks(parallel: ParallelConfig | None, ranks: int) -> None:
    """Raises InvalidArgument when a number of processes cannot form the groups of ``train.parallel``.

    Args:
        parallel: the section; None: every process is a worker.
        ranks: the number of processes of the job.
    """
    if parallel is None:
        return
    if ranks == 1:
        raise InvalidArgument("train.parallel: needs at least 2 processes; this job has 1 (train.workers)")
    if ranks % parallel.tensor:
        divisors = (str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        raise not_allowed(
            "train.parallel.tensor", parallel.tensor, f"divisors of {ranks} processes: {', '.join(divisors)}"
        )
    if parallel.shard is not None and ranks == parallel.tensor:
        raise InvalidArgument(
            f"train.parallel.shard: has no effect with one group of {ranks} processes, as it shards over the groups; "
            "allowed: null"
        )
