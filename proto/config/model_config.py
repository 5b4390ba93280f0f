"""The section ``model`` of a job file: the class of the model, and where its tables live."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ..options.strict_model import FromList, StrictModel

_CLASS = r"^([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:)?[A-Za-z_][A-Za-z0-9_]*$"


class ModelConfig(StrictModel):
    """The model: [one of Sparserow](models.md), or [a class of one's own](own-models.md)."""

    class_: str = Field(
        alias="class",
        pattern=_CLASS,
        description="The class, as MODULE:CLASS; a name without a module is a model of Sparserow (docs/models.md).",
        json_schema_extra={"allowed": "MODULE:CLASS, or the name of a model of Sparserow"},
    )
    args: dict[str, Any] = Field(
        {},
        description="Keyword arguments of the class. For a model of Sparserow, '*' in rows stands for each feature of "
        "keys that no argument names: it has a row for each key that it can give, or else so many. numbers, where it "
        "is left out, are all features of numbers.",
        json_schema_extra={"allowed": "a mapping of names to values"},
    )
    tables: dict[str, Annotated[tuple[Annotated[str, Field(min_length=1)], ...], FromList, Field(min_length=1)]] = (
        Field(
            {},
            description="Paths of the embedding layers that read a table, by the name of the table; several share it. "
            "Other tables are named after their layer.",
            json_schema_extra={"allowed": "a mapping of names to sequences of paths"},
        )
    )
    backend: Literal["ps", "local"] = Field(
        "ps",
        description="ps: tables live on parameter servers. local: the same model in plain torch, to compare.",
    )
    min_rows: int = Field(
        10_000,
        ge=1,
        le=2**44,
        description="An embedding layer with fewer rows stays in the workers, as a dense weight with allreduced "
        "gradients.",
    )
