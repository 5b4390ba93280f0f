"""The section ``train.checkpoint`` of a job file."""

from __future__ import annotations

from pydantic import Field, model_validator

from ..errors import InvalidArgument
from .config import Seconds, StrictModel


class CheckpointConfig(StrictModel):
    """Checkpoints of a job: at these times, and at its end."""

    url: str = Field(
        min_length=1,
        description="Folder, by path or URL, that the workers, the coordinator and all shards can write; of one job.",
    )
    every_steps: int | None = Field(
        None, ge=1, le=1 << 40, description="Steps between two checkpoints; null: not by steps."
    )
    every_seconds: Seconds | None = Field(None, gt=0, description="Time between two checkpoints; null: not by time.")
    keep: int = Field(3, ge=1, le=1 << 20, description="Older checkpoints are removed when there are more.")
    full_every: int = Field(
        1,
        ge=1,
        le=1 << 20,
        description="Of so many checkpoints one holds all rows, the others what changed since; 1: each holds all.",
    )
    delta_every: Seconds | None = Field(
        30.0,
        gt=0,
        description="With bounded or no staleness: time between two saves of the rows that changed, to the folder rows "
        "in url. A shard that ends comes back from the last of them alone; null: it ends the run.",
    )
    max_restarts: int = Field(
        10,
        ge=0,
        le=1 << 20,
        description="With --resume auto: how often a run goes back to the last checkpoint when a process has ended.",
    )

    @model_validator(mode="after")
    def _has_times(self) -> CheckpointConfig:
        if self.every_steps is None and self.every_seconds is None:
            raise InvalidArgument("has neither every_steps nor every_seconds; give one of them")
        return self
