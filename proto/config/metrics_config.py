"""The section ``metrics`` of a job file: what is measured, and where a run is written down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ..errors import InvalidArgument
from .config import FromList, StrictModel

if TYPE_CHECKING:
    from .job import JobConfig


class MetricsConfig(StrictModel):
    """What is measured on the test files after each epoch ([metrics of a job](job-metrics.md))."""

    at: Annotated[tuple[Annotated[int, Field(ge=1, le=100_000)], ...], FromList, Field(min_length=1, max_length=16)] = (
        Field((10,), description="The k of hit_rate@k and ndcg@k, for tasks over candidates.")
    )
    max_groups: int = Field(
        10_000_000,
        ge=1,
        le=2**40,
        description="Most groups of data.columns.group on one worker; an evaluation with more is refused.",
    )


def check_metrics(job: JobConfig) -> None:
    """Raises InvalidArgument when an option of the section has no effect on the tasks and columns of the job."""
    given, columns = job.metrics.model_fields_set, job.data.columns
    losses = {task.loss for task in job.all_tasks}
    if "at" in given and losses <= {"bce", "mse"}:
        raise InvalidArgument("metrics.at: has no effect without a task over candidates; remove it")
    if "max_groups" in given and (columns is None or columns.group is None):
        raise InvalidArgument("metrics.max_groups: has no effect without data.columns.group; remove it")
    if columns is not None and columns.group is not None and "bce" not in losses:
        raise InvalidArgument("data.columns.group: has no effect without a task with loss bce; remove it")
