"""The section ``tables`` of a job: what its tables keep, by column."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ..schema import RowPolicy
from .config import Bytes, Seconds, StrictModel


class TableConfig(StrictModel):
    """Which keys get a row, which rows go again, and how many stay in memory ([admission](admission.md))."""

    admit_after: int = Field(
        1, ge=1, le=255, description="A key gets its row at its so-many-th push; gradients before it are dropped."
    )
    admit_probability: float = Field(1.0, gt=0, le=1, description="Or at each push with this probability.")
    admit_capacity: int = Field(
        RowPolicy.admit_capacity, ge=1, lt=2**40, description="Keys without a row that admit_after remembers."
    )
    evict_after_steps: int = Field(
        0, ge=0, lt=2**31, description="A row that no push changed for so many steps is removed; 0: never."
    )
    evict_after: Seconds | None = Field(
        None, ge=1, lt=2**31, description="Seconds without a push after which a row is removed; null: never."
    )
    evict_below_norm: float = Field(
        0.0, ge=0, le=1e30, description="A row whose weights have a smaller L2 norm is removed; 0: none."
    )
    max_rows: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Rows of the whole table, beyond which some are removed by evict_by; 0: no bound.",
    )
    max_bytes: Bytes | None = Field(
        None, ge=1, lt=2**63, description="Bytes of weights and state of the whole table, likewise; null: no bound."
    )
    evict_by: Literal["lru", "lfu"] = Field(
        "lru", description="Which go first: lru, those pushed to longest ago; lfu, those pushed to least often."
    )
    ram_share: float = Field(
        0.0,
        ge=0,
        le=0.9,
        description="Part of each shard's memory_budget that is the table's own; 0: none. Needs an SSD.",
    )

    def policy(self) -> RowPolicy:
        """As a table's schema holds it."""
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
