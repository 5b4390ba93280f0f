"""The section ``train.cache`` of a job."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ..errors import not_allowed
from ..options.strict_model import Bytes, StrictModel
from ..schema import Dtype


class CacheConfig(StrictModel):
    """A cache in each worker that keeps rows for later steps."""

    bytes: Bytes = Field(ge=1, description="Size of each worker's cache: its rows and their bookkeeping, in bytes.")
    staleness: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="Number of steps for which a cached row is used without asking the servers; it counts towards "
        "train.staleness. 0: each use asks whether the row has changed.",
    )
    own_commits: Literal["exact", "bounded"] = Field(
        "exact",
        description="exact: a row that the worker's own step changed is read again before its next use. bounded: such "
        "a row may be as old as staleness allows, like rows that other workers changed.",
    )
    dtype: Dtype = Field(
        "float32",
        description="Dtype in which rows are kept. 16 bits round a kept row, not those of the servers, and need "
        "staleness of at least 1.",
    )

    @model_validator(mode="after")
    def _is_exact_where_staleness_is_0(self) -> CacheConfig:
        if self.dtype != "float32" and self.staleness == 0:
            raise not_allowed(
                "train.cache.dtype", self.dtype, "float32 with train.cache.staleness 0, which gives the servers' bits"
            )
        return self
