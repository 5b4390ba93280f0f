"""Schedules of learning rates, as a job file names them. A schedule counts committed steps, and no skipped steps."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from .config import StrictModel


class _ScheduleBase(StrictModel):
    warmup_steps: int = Field(
        0,
        ge=0,
        le=1 << 40,
        description="Number of first steps in which the rates rise linearly; step t has the share (t + 1) / "
        "warmup_steps.",
    )


class ConstantSchedule(_ScheduleBase):
    """Constant learning rates, as the optimizers have them; warmup_steps adds a linear warmup."""

    kind: Literal["constant"] = Field("constant", description="Kind of schedule.")


class StepSchedule(_ScheduleBase):
    """Learning rates that fall by a factor every so many steps."""

    kind: Literal["step"] = Field(description="Kind of schedule.")
    every_steps: int = Field(ge=1, le=1 << 40, description="Steps between two falls.")
    factor: float = Field(0.1, gt=0, le=1, description="Factor that multiplies the rates at each fall.")


class CosineSchedule(_ScheduleBase):
    """Learning rates that follow half a cosine down to 0, and stay 0 from then on."""

    kind: Literal["cosine"] = Field(description="Kind of schedule.")
    total_steps: int = Field(ge=1, le=1 << 40, description="Steps until the rates are 0, including the warmup.")


class LinearSchedule(_ScheduleBase):
    """Learning rates that fall linearly to a final share, and stay level from then on."""

    kind: Literal["linear"] = Field(description="Kind of schedule.")
    total_steps: int = Field(ge=1, le=1 << 40, description="Steps until the rates stop falling, including the warmup.")
    final_factor: float = Field(0.0, ge=0, le=1, description="Share of the initial rates at the end.")


ScheduleConfig: TypeAlias = Annotated[
    ConstantSchedule | StepSchedule | CosineSchedule | LinearSchedule, Field(discriminator="kind")
]
