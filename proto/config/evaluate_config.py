"""The section ``train.test_every`` of a job file."""

from __future__ import annotations

from pydantic import Field, model_validator

from ..errors import InvalidArgument
from ..options.strict_model import Seconds, StrictModel


class EvaluateEveryConfig(StrictModel):
    """When a job scores the test files within an epoch, by exactly one of steps, samples and seconds."""

    steps: int | None = Field(
        None, ge=1, le=1 << 40, description="Steps of the run between two tests; null: they do not count."
    )
    samples: int | None = Field(
        None,
        ge=1,
        le=1 << 50,
        description="Samples of all workers between two tests, rounded up to whole steps of full batches; null: they "
        "do not count.",
    )
    seconds: Seconds | None = Field(
        None,
        gt=0,
        description="Time of training between two tests, by the clock of the first worker; null: it does not count.",
    )

    @model_validator(mode="after")
    def _has_one(self) -> EvaluateEveryConfig:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidArgument(
                f"{' and '.join(given) or 'none of steps, samples and seconds'} given; allowed: exactly one of steps, "
                "samples and seconds"
            )
        return self
