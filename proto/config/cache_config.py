"""The section ``train.cache`` of a job."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .config import Bytes, StrictModel


class CacheConfig(StrictModel):
    """Rows kept in each worker for later steps."""

    bytes: Bytes = Field(ge=1, description="Of rows with their bookkeeping, in each worker.")
    staleness: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="Steps that a row is used for without asking the servers; part of train.staleness. 0: each use "
        "asks whether the row has changed.",
    )
    own_commits: Literal["exact", "bounded"] = Field(
        "exact",
        description="exact: a row that the worker's own step changed is asked for before its next use. bounded: it is "
        "seen within staleness, as others' steps are.",
    )
