"""The section ``tables`` of a job: where its tables are and which rows they keep, by column."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ..schema import RowPolicy
from .config import Bytes, Seconds, StrictModel


class TableConfig(StrictModel):
    """Where a table is ([tables on devices](device-tables.md)), which keys get a row, which rows are removed, and how
    many stay in memory ([admission](admission.md)).
    """

    placement: Literal["servers", "device", "auto"] = Field(
        "servers",
        description="Where the rows are. servers: on the parameter servers. device: spread over the devices of the "
        "workers, which must step together. auto: device where the job allows it and sparserow plan would choose it.",
    )

    admit_after: int = Field(
        1,
        ge=1,
        le=255,
        description="Number of the push that gives a key its row; the gradients of earlier pushes are dropped.",
    )
    admit_probability: float = Field(
        1.0, gt=0, le=1, description="Probability that a push gives its key a row; below 1 it needs admit_after 1."
    )
    admit_capacity: int = Field(
        RowPolicy.admit_capacity,
        ge=1,
        lt=2**40,
        description="Number of keys without a row whose pushes admit_after counts.",
    )
    evict_after_steps: int = Field(
        0, ge=0, lt=2**31, description="Number of steps without a push after which a row is removed; 0: never."
    )
    evict_after: Seconds | None = Field(
        None, ge=1, lt=2**31, description="Seconds without a push after which a row is removed; null: never."
    )
    evict_below_norm: float = Field(
        0.0,
        ge=0,
        le=1e30,
        description="A row is removed when the L2 norm of its weights is smaller; 0: none is removed.",
    )
    max_rows: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Bound on the rows of the whole table; evict_by chooses which rows beyond it are removed. 0: no "
        "bound.",
    )
    max_bytes: Bytes | None = Field(
        None, ge=1, lt=2**63, description="Bound on the bytes of weights and state of the whole table; null: no bound."
    )
    evict_by: Literal["lru", "lfu"] = Field(
        "lru",
        description="Which rows are removed first. lru: those with the oldest last push. lfu: those with the fewest "
        "pushes.",
    )
    ram_share: float = Field(
        0.0,
        ge=0,
        le=0.9,
        description="Share of each shard's memory_budget that is reserved for the table; 0: none. It needs an SSD.",
    )

    def policy(self) -> RowPolicy:
        """Returns the policy in the form that a table's schema holds."""
        return RowPolicy(
            admit_after=self.admit_after,
            admit_probability=self.admit_probability,
            admit_capacity=self.admit_capacity,
            evict_after_steps=self.evict_after_steps,
            evict_after_seconds=round(self.evict_after or 0),
            evict_below_norm=self.evict_below_norm,
            max_rows=self.max_rows,
            max_bytes=self.max_bytes or 0,
            evict_by=self.evict_by,
            ram_share=self.ram_share,
        )

    @model_validator(mode="after")
    def _is_a_policy(self) -> TableConfig:
        self.policy()
        return self
