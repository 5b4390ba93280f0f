"""The section ``model`` of a job file: a model by its kind, or a class of one's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from ..schema import MAX_DIM
from .config import FromList, StrictModel

_CLASS = r"^([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:)?[A-Za-z_][A-Za-z0-9_]*$"
_Backend: TypeAlias = Literal["ps", "local"]
_BACKEND: Any = Field(
    "ps", description="ps: tables live on parameter servers. local: the same model in plain torch, to compare."
)


class _ModelBase(StrictModel):
    backend: _Backend = _BACKEND
    dim: int = Field(16, ge=1, le=MAX_DIM, description="Number of elements of an embedding.")
    rows: int = Field(1_000_000, ge=1, le=2**44, description="Rows of a table; the row of a key is key modulo rows.")
    table_rows: dict[str, Annotated[int, Field(ge=1, le=2**44)]] = Field(
        {}, description="Rows of a table, by its column; other tables have the number in rows."
    )
    min_rows: int = Field(
        1,
        ge=1,
        le=2**44,
        description="A table with fewer rows stays in the workers, as a dense weight with allreduced gradients.",
    )
    init_scale: float = Field(
        0.01, ge=0, le=10, description="Initial embeddings are uniform in [-init_scale, init_scale)."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Probability that a hidden unit is dropped in training.")


_Widths: TypeAlias = Annotated[tuple[Annotated[int, Field(ge=1, le=65536)], ...], FromList]


class DlrmConfig(_ModelBase):
    """DLRM, the deep learning recommendation model (Naumov et al. 2019)."""

    kind: Literal["dlrm"] = Field(description="Which model.")
    bottom: _Widths = Field(
        (64,), description="Hidden widths of the bottom MLP; its output is as wide as an embedding."
    )
    top: _Widths = Field((64, 64), description="Hidden widths of the top MLP.")


class DeepFmConfig(_ModelBase):
    """DeepFM, a factorization machine beside an MLP (Guo et al. 2017)."""

    kind: Literal["deepfm"] = Field(description="Which model.")
    hidden: _Widths = Field((64, 64), description="Hidden widths of the MLP.")


class OwnModelConfig(StrictModel):
    """A class of one's own ([bring your model](own-models.md)); ``class`` alone names it, and ``kind`` may be left
    out.
    """

    kind: Literal["own"] = Field("own", description="Which model.")
    class_: str = Field(
        alias="class",
        pattern=_CLASS,
        description="The class, as MODULE:CLASS; a name without a module is a model of sparserow (docs/models.md).",
        json_schema_extra={"allowed": "MODULE:CLASS, or the name of a model of sparserow"},
    )
    args: dict[str, Any] = Field(
        {},
        description="Keyword arguments of the class.",
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
    backend: _Backend = _BACKEND
    min_rows: int = Field(
        10_000,
        ge=1,
        le=2**44,
        description="An embedding layer with fewer rows stays in the workers, as a dense weight with allreduced "
        "gradients.",
    )


def _with_kind(value: object) -> object:
    """Names the kind of a section that gives a class."""
    if isinstance(value, dict) and "class" in value and "kind" not in value:
        return {"kind": "own", **value}
    return value


ModelConfig: TypeAlias = Annotated[
    DlrmConfig | DeepFmConfig | OwnModelConfig, Field(discriminator="kind"), BeforeValidator(_with_kind)
]
