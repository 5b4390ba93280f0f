"""Schedules of learning rates, as a job file names them. A schedule counts committed steps, and no skipped steps; one
that falls by epochs counts epochs."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from ..errors import InvalidArgument
from ..options.strict_model import StrictModel


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
    """Learning rates that fall by a factor every so many steps or epochs."""

    kind: Literal["step"] = Field(description="Kind of schedule.")
    every_steps: int | None = Field(
        None, ge=1, le=1 << 40, description="Steps between two falls; null: every_epochs says when."
    )
    every_epochs: int | None = Field(
        None, ge=1, le=1 << 20, description="Epochs between two falls; null: every_steps says when."
    )
    factor: float = Field(0.1, gt=0, le=1, description="Factor that multiplies the rates at each fall.")

    @model_validator(mode="after")
    def _falls_by_steps_or_epochs(self) -> StepSchedule:
        if (self.every_steps is None) == (self.every_epochs is None):
            raise InvalidArgument(
                "train.schedule: kind step falls every so many steps or epochs; allowed: one of every_steps and "
                "every_epochs"
            )
        return self


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
