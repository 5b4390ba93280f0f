"""The section ``train.elastic`` of a job file."""

from __future__ import annotations

from pydantic import Field

from ..errors import InvalidArgument
from .config import Seconds, StrictModel


class ElasticConfig(StrictModel):
    """Workers that come and go while the job goes on."""

    lease_rows: int = Field(
        16384,
        ge=1,
        le=1 << 26,
        description="Lines that a worker leases at a time, rounded up to whole batches; they are shuffled together. "
        "What a worker that dies had not trained on of it goes to another.",
    )
    url: str | None = Field(
        None,
        min_length=1,
        description="Folder, by path or URL, of one job, where the coordinator saves rows and how far the epoch is. "
        "--resume auto goes on from there. null: nothing is saved.",
        json_schema_extra={"allowed": "a path or a URL"},
    )
    save_every: Seconds = Field(30.0, gt=0, description="Time between two such saves; each has what changed.")
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
        raise InvalidArgument("train.checkpoint: is not possible with train.elastic, which has url; allowed: null")
