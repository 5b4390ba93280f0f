"""The section ``train.elastic`` of a job file."""

from __future__ import annotations

from pydantic import Field

from .config import StrictModel
from .errors import InvalidArgument


class ElasticConfig(StrictModel):
    """Workers that come and go while the job goes on."""

    lease_rows: int = Field(
        16384,
        ge=1,
        le=1 << 26,
        description="Lines that a worker leases at a time, rounded up to whole batches; they are shuffled together. "
        "What a worker that dies had leased is trained on once more.",
    )
    max_restarts: int = Field(
        10,
        ge=0,
        le=1 << 20,
        description="How often workers of this machine that ended are started again, all together; torchrun has "
        "--max-restarts.",
    )


def check_elastic(dense: str, staleness: int | None, prefetch: int, *, has_checkpoints: bool) -> None:
    """Raises InvalidArgument unless the other settings of ``train`` let workers come and go."""
    if dense != "ps":
        raise InvalidArgument(f"train.elastic: needs train.dense ps, where workers never meet; it is {dense}")
    if staleness == 0:
        raise InvalidArgument(
            "train.elastic: is not possible with train.staleness 0, where all workers go back together; allowed: >= 1, "
            "or null"
        )
    if prefetch:
        raise InvalidArgument(f"train.prefetch: {prefetch} is not possible with train.elastic; allowed: 0")
    if has_checkpoints:
        raise InvalidArgument("train.checkpoint: is not possible with train.elastic; allowed: null")
