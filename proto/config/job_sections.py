"""The sections of a job file, without the rules between them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..options.strict_model import StrictModel
from .cluster_config import ClusterConfig
from .data_config import DataConfig
from .metrics_config import MetricsConfig
from .model_config import ModelConfig
from .publish_config import PublishConfig
from .table_config import TableConfig
from .tasks_config import TaskConfig
from .train_config import TrainConfig


class JobSections(StrictModel):
    """The sections of a training job, each checked by itself; :class:`~.job.JobConfig` checks them together."""

    name: str = Field(
        "default",
        pattern=r"^[A-Za-z0-9_.-]{1,255}$",
        description="Name of the job, and the namespace of its tables.",
        json_schema_extra={"allowed": "1-255 of letters, digits, _ . -"},
    )
    data: DataConfig = Field(description="Training and test files.")
    features: dict[str, dict[str, Any]] = Field(
        {},
        description="[Features](features.md) of the model by name, each with a kind and its options. {}: with format "
        "criteo the logarithm of I1 to I13 and the keys of C1 to C26.",
        json_schema_extra={
            "allowed": "a mapping of sections with kind: id, dense, bucketize, cross, time, multi_hot, sequence, split"
        },
    )
    model: ModelConfig = Field(
        description="Model to train.",
        json_schema_extra={"allowed": "a section with class"},
    )
    tasks: dict[str, TaskConfig] = Field(
        {},
        description="Outputs of the model by name, with the label and the loss of each; {}: one task with bce.",
        json_schema_extra={"allowed": "a mapping of sections with label, loss and weight"},
    )
    train: TrainConfig = Field(TrainConfig(), description="How the model is trained.")
    metrics: MetricsConfig = Field(MetricsConfig(), description="What is measured on the test files.")
    tables: dict[str, TableConfig] = Field(
        {},
        description="Where a table is, what its rows are and which of them it keeps, by the name of the table; * and "
        "? match names, and the first match counts.",
    )
    cluster: ClusterConfig = Field(ClusterConfig(), description="Where the tables live.")
    publish: PublishConfig = Field(PublishConfig(), description="Where the trained model goes at the end of the run.")
