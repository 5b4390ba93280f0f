"""The section ``publish`` of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .config import StrictModel
from .path_text import PathText

_NAME = r"^[A-Za-z0-9_.-]{1,255}$"
_ALLOWED_NAME = "1-255 of letters, digits, _ . -"


class PublishConfig(StrictModel):
    """Where the trained model is published as a new version for serving (docs/serving.md), at the end of the run."""

    root: PathText = Field(
        min_length=1, description="Folder of published models, by path or URL, that worker 0 can write."
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
