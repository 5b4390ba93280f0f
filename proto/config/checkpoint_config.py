"""The section ``train.checkpoint`` of a job file."""

from __future__ import annotations

from pydantic import Field, model_validator

from ..errors import InvalidArgument
from ..options.path_text import PathText
from ..options.strict_model import Seconds, StrictModel
from .started_config import Accepted, accepted_field, check_start, start_from_field


class CheckpointConfig(StrictModel):
    """When and where a job saves checkpoints; a finished job saves another at its end."""

    url: PathText = Field(
        min_length=1,
        description="Folder, by path or URL, that the workers, the coordinator and all shards can write. Each job "
        "needs a folder of its own.",
    )
    start_from: PathText | None = start_from_field(
        "A run without checkpoints of its own begins with its rows, tower, optimizers, schedules and statistics of "
        "features, over the files of this job."
    )
    accept: Accepted = accepted_field()
    every_steps: int | None = Field(
        None, ge=1, le=1 << 40, description="Steps between two checkpoints; null: the step number starts none."
    )
    every_seconds: Seconds | None = Field(
        None, gt=0, description="Time between two checkpoints; null: the clock starts none."
    )
    keep: int = Field(3, ge=1, le=1 << 20, description="Number of newest checkpoints that are kept.")
    full_every: int = Field(
        1,
        ge=1,
        le=1 << 20,
        description="One checkpoint in full_every holds all rows; the others hold the changed rows. 1: each holds all.",
    )
    delta_every: Seconds | None = Field(
        30.0,
        gt=0,
        description="Time between two saves of the rows that changed, to the folder rows in url; it applies with "
        "bounded or no staleness. A shard that ended is restored alone from the last such save. null: the end of a "
        "shard ends the run.",
    )
    max_restarts: int = Field(
        10,
        ge=0,
        le=1 << 20,
        description="With --resume auto: how often a run returns to its last checkpoint after a process ended.",
    )

    @model_validator(mode="after")
    def _has_times(self) -> CheckpointConfig:
        if self.every_steps is None and self.every_seconds is None:
            raise InvalidArgument("neither every_steps nor every_seconds is given; give at least one of them")
        check_start(self.start_from, self.accept, self.url)
        return self
