"""The section ``train.spike`` of a job file."""

from __future__ import annotations

from pydantic import Field

from ..options.strict_model import StrictModel


class SpikeConfig(StrictModel):
    """When a loss that jumps sets the job back to its newest checkpoint before the jump.

    Rows, tower, optimizers and schedules go back; the data since is passed over, and not read again.
    """

    factor: float = Field(
        gt=1,
        le=1e6,
        description="How many times its mean over the window the mean loss of the window's last tenth may be, by the "
        "samples of the first worker.",
    )
    window: int = Field(
        200, ge=10, le=1 << 20, description="Steps of the window; nothing is compared before it is full."
    )
    skip: int = Field(
        100, ge=0, le=1 << 20, description="Steps whose data is passed over behind the jump as well, before it goes on."
    )
    most: int = Field(10, ge=0, le=10_000, description="How often the job goes back; the next jump ends it.")
