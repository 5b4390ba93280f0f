"""The section ``metrics`` of a job file: what is measured, and where a run is written down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ..errors import InvalidArgument, not_allowed
from .config import FromList, StrictModel

if TYPE_CHECKING:
    from .job import JobConfig


_JUDGED = (*("auc", "gauc", "log_loss", "normalized_entropy", "mse", "mae", "loss", "mrr", "hit_rate@K", "ndcg@K"),)


class ProgressiveConfig(StrictModel):
    """Metrics of training samples, each predicted before it is trained on."""

    window: int = Field(
        100_000, ge=1, le=2**40, description="Samples of all workers in a window, rounded up to whole steps."
    )


class StopConfig(StrictModel):
    """When a job ends before its last epoch."""

    metric: str = Field(min_length=1, description="Metric of the test files, as TASK.METRIC, such as click.auc.")
    after: int = Field(1, ge=1, le=10_000, description="Epochs without a better value after which the job ends.")
    least_gain: float = Field(0.0, ge=0, le=1e6, description="Change from which on a value is better.")

    @property
    def is_better_higher(self) -> bool:
        """Whether a higher value of the metric is better."""
        return self.metric.rpartition(".")[2].partition("@")[0] in ("auc", "gauc", "mrr", "hit_rate", "ndcg")


class MetricsConfig(StrictModel):
    """What is measured on the test files after each epoch ([metrics of a job](job-metrics.md))."""

    at: Annotated[tuple[Annotated[int, Field(ge=1, le=100_000)], ...], FromList, Field(min_length=1, max_length=16)] = (
        Field((10,), description="The k of hit_rate@k and ndcg@k, for tasks over candidates.")
    )
    max_groups: int = Field(
        10_000_000,
        ge=1,
        le=2**40,
        description="Most groups of the group column on one worker; an evaluation with more is refused.",
    )
    progressive: ProgressiveConfig | None = Field(
        None,
        description="Metrics of training samples before each is trained on, for metrics.file and metrics.tensorboard; "
        "null: none.",
        json_schema_extra={"allowed": "a section with window, {} for its default"},
    )
    stop: StopConfig | None = Field(
        None,
        description="Ends the job when a metric of the test files gets no better any more; null: at the last epoch.",
        json_schema_extra={"allowed": "a section with metric"},
    )
    file: Annotated[str | None, Field(min_length=1)] = Field(
        None,
        description="File to which the first worker appends a JSON object a line: progress, windows, epochs; "
        "sparserow report draws it. null: none.",
        json_schema_extra={"allowed": "a path"},
    )
    tensorboard: Annotated[str | None, Field(min_length=1)] = Field(
        None,
        description="Folder of event files for TensorBoard, which the first worker writes; null: none.",
        json_schema_extra={"allowed": "a path"},
    )


def check_metrics(job: JobConfig) -> None:
    """Raises InvalidArgument when an option of the section has no effect on the tasks and columns of the job."""
    given, columns = job.metrics.model_fields_set, job.data.samples
    losses = {task.loss for task in job.all_tasks}
    if "at" in given and losses <= {"bce", "mse"}:
        raise InvalidArgument("metrics.at: has no effect without a task over candidates; remove it")
    if "max_groups" in given and columns.group is None:
        where = "a group column, which data.format criteo lacks"
        where = where if job.data.format == "criteo" else f"{columns.section}.group"
        raise InvalidArgument(f"metrics.max_groups: has no effect without {where}; remove it")
    if job.metrics.progressive is not None:
        if job.metrics.file is None and job.metrics.tensorboard is None:
            raise InvalidArgument(
                "metrics.progressive: has no effect without metrics.file or metrics.tensorboard; remove it"
            )
        if "bce" not in losses:
            raise InvalidArgument("metrics.progressive: has no effect without a task with loss bce; remove it")
    if job.metrics.stop is not None:
        if job.train.dense == "ps":
            raise InvalidArgument("metrics.stop: is not possible with train.dense ps, where workers do not meet")
        name = job.metrics.stop.metric.rpartition(".")[2].partition("@")[0]
        if name not in [judged.partition("@")[0] for judged in _JUDGED]:
            raise not_allowed("metrics.stop.metric", job.metrics.stop.metric, f"TASK. and one of {', '.join(_JUDGED)}")
    if columns.timestamp is not None and (job.metrics.progressive is None or job.metrics.file is None):
        raise InvalidArgument(
            f"{columns.section}.timestamp: has no effect without metrics.progressive and metrics.file; remove it"
        )
    if columns.group is not None and "bce" not in losses:
        raise InvalidArgument(f"{columns.section}.group: has no effect without a task with loss bce; remove it")
