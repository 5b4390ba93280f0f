"""The section ``train.checkpoint`` of a job file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from ..checkpoint.accepted import check_accepted
from ..errors import InvalidArgument
from ..options.path_text import PathText
from ..options.strict_model import FromList, Seconds, StrictModel

TOWER = "tower"  # among what a job accepts


class CheckpointConfig(StrictModel):
    """When and where a job saves checkpoints; a finished job saves another at its end."""

    url: PathText = Field(
        min_length=1,
        description="Folder, by path or URL, that the workers, the coordinator and all shards can write. Each job "
        "needs a folder of its own.",
    )
    start_from: PathText | None = Field(
        None,
        min_length=1,
        description="Folder of another run's checkpoints, by path or URL, or one of them (FOLDER/save-000003; else the "
        "newest); or the version that an alias or a number names in publish.root (ctr@live). A run without checkpoints "
        "of its own begins with its rows, tower, optimizers, schedules and statistics of features, over the files of "
        "this job. `sparserow train --from` sets it. null: it begins anew.",
        json_schema_extra={"allowed": "a path, a URL or NAME@ALIAS"},
    )
    accept: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], FromList] = Field(
        (),
        description="What may differ from start_from: TABLE.dim (wider; new columns are initial, the optimizer's state "
        "begins anew), TABLE.dtype (weights are rounded), TABLE.optimizer (its state begins anew), with * for every "
        "table; tower: tower and dense optimizer begin anew. `sparserow train --accept` sets it.",
        json_schema_extra={"allowed": "TABLE.dim, TABLE.dtype, TABLE.optimizer, tower"},
    )
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
        if self.start_from is not None and self.start_from.rstrip("/").startswith(self.url.rstrip("/")):
            raise InvalidArgument(
                f"start_from: {self.start_from} is of url, where --resume goes on; name another folder"
            )
        if self.accept and self.start_from is None:
            raise InvalidArgument("accept: has no effect without start_from")
        check_accepted([each for each in self.accept if each != TOWER], "accept")
        return self
