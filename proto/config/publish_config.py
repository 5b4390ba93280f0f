"""The section ``publish`` of a job file: where the model goes, and when."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..options.path_text import PathText
from ..options.strict_model import Seconds, StrictModel

_NAME = r"^[A-Za-z0-9_.-]{1,255}$"
_ALLOWED_NAME = "1-255 of letters, digits, _ . -"


class PublishConfig(StrictModel):
    """Where the trained model goes at the end of the run, and meanwhile: it is published for serving (docs/serving.md),
    or left.
    """

    root: Annotated[PathText | None, Field(min_length=1)] = Field(
        None,
        description="Folder of published models, by path or URL, that worker 0 can write: the model is a new version "
        "there. null: it is not published.",
        json_schema_extra={"allowed": "a path or URL, or null"},
    )
    local: Annotated[PathText | None, Field(min_length=1)] = Field(
        "kept-models",
        description="Folder, by path or URL, where a model is left that is not published, or could not be: as a "
        "version of rows and program without an alias, of which the newest 3 stay. With a running cluster only the "
        "program is left, as a file. null: nothing is left.",
        json_schema_extra={"allowed": "a path or URL, or null"},
    )
    model: Annotated[str | None, Field(pattern=_NAME)] = Field(
        None,
        description="Name of the model; null: the job's name.",
        json_schema_extra={"allowed": f"{_ALLOWED_NAME}, or null"},
    )
    alias: Annotated[str | None, Field(pattern=_NAME)] = Field(
        "live",
        description="Alias that names the version once it is complete; null: no alias.",
        json_schema_extra={"allowed": f"{_ALLOWED_NAME}, or null"},
    )
    dtype: Literal["float32", "bfloat16", "float16", "int8"] | None = Field(
        None, description="Dtype of the published rows; null: the dtype in training."
    )
    sign: Literal["rows"] | None = Field(
        None,
        description="What the publisher's signature covers besides the program, the features, the tables and the card, "
        "which it covers where the security file names a signing_key. rows: the rows too; it needs a signing_key.",
    )

    every: Seconds | None = Field(
        None,
        gt=0,
        description="Time between two versions that are published while the run goes on; where workers average "
        "gradients they wait meanwhile. null: the model is published at its end alone.",
    )
    by: Literal["clock", "event_time"] = Field(
        "clock",
        description="What every counts. clock: the time of the first worker. event_time: a version is due when the "
        "watermark of data.stream passes a multiple of every.",
    )
    least_pause: Seconds = Field(
        60.0,
        ge=0,
        description="With by event_time, time of the clock in which nothing is published after a publication, as while "
        "a job catches up.",
    )
    keep: int = Field(
        10,
        ge=1,
        le=10_000,
        description="With every, how many of the model's versions stay, the newest ones, beside those that an alias "
        "names or named last before.",
    )

    @property
    def folder(self) -> str | None:
        """The folder where the model goes; None: it goes nowhere."""
        return self.local if self.root is None else self.root

    @property
    def is_asked(self) -> bool:
        """Whether the job names the folder, so that a run whose model cannot go there fails."""
        return self.folder is not None and not self.model_fields_set.isdisjoint(("root", "local"))
