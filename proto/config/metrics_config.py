"""The section ``metrics`` of a job file: what is measured, and where a run is written down."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..options.path_text import PathText
from ..options.strict_model import FromList, StrictModel


def is_better_higher(metric: str) -> bool:
    """Returns whether a higher value of a metric is better; its name is TASK.METRIC."""
    return metric.rpartition(".")[2].partition("@")[0] in ("auc", "gauc", "mrr", "hit_rate", "ndcg")


class ProgressiveConfig(StrictModel):
    """Metrics of training samples, each predicted before it is trained on."""

    window: int = Field(
        100_000,
        ge=1,
        le=2**40,
        description="Samples of all workers in a window, rounded up to whole steps; with dense ps those of a worker.",
    )


class StopConfig(StrictModel):
    """When a job ends before its last epoch."""

    metric: str = Field(min_length=1, description="Metric of the test files, as TASK.METRIC, such as click.auc.")
    after: int = Field(
        1,
        ge=1,
        le=10_000,
        description="Tests without a better value after which the job ends: one after each epoch, and "
        "those of train.test_every.",
    )
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
        description="Metric of the test files, as TASK.METRIC, by which the model of the best test is published or "
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
