"""Schedules of learning rates, as a job file names them. Steps count commits, skipped ones not."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from .config import StrictModel


class _ScheduleBase(StrictModel):
    warmup_steps: int = Field(
        0, ge=0, le=1 << 40, description="The first so many steps rise linearly: step t has (t + 1) / warmup_steps."
    )


class ConstantSchedule(_ScheduleBase):
    """The rates of the optimizers; with warmup_steps a linear warmup."""

    kind: Literal["constant"] = Field("constant", description="Which schedule.")


class StepSchedule(_ScheduleBase):
    """Falls by a factor, again and again."""

    kind: Literal["step"] = Field(description="Which schedule.")
    every_steps: int = Field(ge=1, le=1 << 40, description="Steps between two falls.")
    factor: float = Field(0.1, gt=0, le=1, description="What the rates are multiplied by.")


class CosineSchedule(_ScheduleBase):
    """Half a cosine down to 0, and 0 from then on."""

    kind: Literal["cosine"] = Field(description="Which schedule.")
    total_steps: int = Field(ge=1, le=1 << 40, description="Steps until 0, those of the warmup included.")


class LinearSchedule(_ScheduleBase):
    """A straight line down, and level from then on."""

    kind: Literal["linear"] = Field(description="Which schedule.")
    total_steps: int = Field(ge=1, le=1 << 40, description="Steps until the end, those of the warmup included.")
    final_factor: float = Field(0.0, ge=0, le=1, description="Share of the rates at the end.")


ScheduleConfig: TypeAlias = Annotated[
    ConstantSchedule | StepSchedule | CosineSchedule | LinearSchedule, Field(discriminator="kind")
]
