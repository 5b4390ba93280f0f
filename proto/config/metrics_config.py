"""The section ``metrics`` of a job file: what is measured, and where a run is written down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ..errors import InvalidArgument, not_allowed
from .config import FromList, StrictModel
from .path_text import PathText

if TYPE_CHECKING:
    from .job import JobConfig


def is_better_higher(metric: str) -> bool:
    """Returns whether a higher value of a metric is better; its name is TASK.METRIC."""
    return metric.rpartition(".")[2].partition("@")[0] in ("auc", "gauc", "mrr", "hit_rate", "ndcg")


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
    weighted: bool = Field(
        False,
        description="Whether metrics of the test files weigh samples by data.columns.sample_weight; false: each counts "
        "once.",
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
    best: Annotated[str | None, Field(min_length=1)] = Field(
        None,
        description="Metric of the test files, as TASK.METRIC, by which the model of the best epoch is published or "
        "kept; its checkpoint stays as well. null: the model of the last epoch.",
        json_schema_extra={"allowed": "TASK.METRIC, such as click.auc, with train.checkpoint"},
    )
    file: Annotated[PathText | None, Field(min_length=1)] = Field(
        None,
        description="File to which the first worker appends a JSON object a line: progress, windows, epochs; "
        "sparserow report draws it. null: none.",
        json_schema_extra={"allowed": "a path"},
    )
    tensorboard: Annotated[PathText | None, Field(min_length=1)] = Field(
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
        where = _column_of(job, "group", "a group column")
        raise InvalidArgument(f"metrics.max_groups: has no effect without {where}; remove it")
    if job.metrics.weighted and columns.sample_weight is None:
        where = _column_of(job, "sample_weight", "sample weights")
        raise InvalidArgument(f"metrics.weighted: has no effect without {where}; remove it")
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
        _check_judged(job, "metrics.stop.metric", job.metrics.stop.metric)
    if job.metrics.best is not None:
        _check_best(job, job.metrics.best)
    if columns.timestamp is not None and (job.metrics.progressive is None or job.metrics.file is None):
        raise InvalidArgument(
            f"{columns.section}.timestamp: has no effect without metrics.progressive and metrics.file; remove it"
        )
    if columns.group is not None and "bce" not in losses:
        raise InvalidArgument(f"{columns.section}.group: has no effect without a task with loss bce; remove it")


def _column_of(job: JobConfig, setting: str, words: str) -> str:
    """Returns the setting that names a column, or that the format of the data has no such column."""
    return (
        f"{words}, which data.format criteo lacks"
        if job.data.format == "criteo"
        else f"{job.data.samples.section}.{setting}"
    )


def _check_judged(job: JobConfig, setting: str, metric: str) -> None:
    """Raises InvalidArgument when the evaluations of a job do not have a metric, or it has no better and worse."""
    judged = [f"{task.name}.{name}" for task in job.all_tasks for name in _judged(job, task.loss)]
    if metric not in judged:
        raise not_allowed(setting, metric, ", ".join(judged))


def _judged(job: JobConfig, loss: str) -> list[str]:
    """Returns the names of the metrics of a loss for which higher or lower is better."""
    if loss == "mse":
        return ["mse", "mae"]
    if loss != "bce":
        return ["loss", "mrr", *(f"{name}@{k}" for k in job.metrics.at for name in ("hit_rate", "ndcg"))]
    has_groups = job.data.samples.group is not None
    return ["auc", *(["gauc"] if has_groups else []), "log_loss", "normalized_entropy"]


def _check_best(job: JobConfig, metric: str) -> None:
    _check_judged(job, "metrics.best", metric)
    if job.train.dense == "ps":
        raise InvalidArgument("metrics.best: is not possible with train.dense ps, where workers do not meet")
    if job.train.checkpoint is None:
        raise InvalidArgument("metrics.best: needs train.checkpoint, which keeps the best model until the end")
    if job.train.cache is not None:
        raise InvalidArgument("metrics.best: is not possible with train.cache, whose rows a restore does not reach")
