"""The section ``tasks`` of a job file: what each output of the model is trained for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from ..errors import InvalidArgument, not_allowed
from .config import StrictModel
from .model_config import OwnModelConfig

if TYPE_CHECKING:
    from .job import JobConfig

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
LossName: TypeAlias = Literal["bce", "mse", "softmax", "bpr", "in_batch_softmax"]


class TaskConfig(StrictModel):
    """One output of the model: its label, its loss, and what the loss counts in the sum."""

    label: Annotated[str | None, Field(min_length=1)] = Field(
        None, description="The label; null: the label of the task's name, or the only label."
    )
    loss: LossName = Field(
        "bce",
        description="bce: binary cross entropy of logits. mse: squared error. softmax, bpr: of candidates, whose "
        "positive is the label. in_batch_softmax: of a matrix of scores, whose diagonal has the positives.",
    )
    weight: float = Field(1.0, gt=0, le=1e6, description="Factor of the loss in the sum of all tasks.")
    item: Annotated[str | None, Field(min_length=1)] = Field(
        None,
        description="Feature with the key of a sample's item, for in_batch_softmax: the loss corrects for how often an "
        "item is in a batch (logQ), and samples of one item are no negatives of each other; null: neither.",
    )


@dataclass(frozen=True)
class Task:
    """An output of the model, its label and its loss.

    Attributes:
        name: the name of the task.
        label: the name of the label.
        loss: the name of the loss.
        weight: the factor of the loss.
        item: the feature with the key of a sample's item; None: the loss does not ask for it.
    """

    name: str
    label: str
    loss: LossName = "bce"
    weight: float = 1.0
    item: str | None = None


def tasks_of_job(job: JobConfig) -> tuple[Task, ...]:
    """Returns the tasks of a job; without the section, one with binary cross entropy.

    Raises:
        InvalidArgument: a task has no such label, or the model of the job cannot have these tasks.
    """
    section, labels = job.data.samples.section, tuple(job.data.samples.labels)
    if not job.tasks:
        if len(labels) > 1:
            raise InvalidArgument(f"tasks: are needed, as {section}.labels has several: {', '.join(labels)}")
        name = labels[0] if labels else "label"
        return (_named(Task(name, name)),)
    made = tuple(_named(_task(name, task, labels)) for name, task in job.tasks.items())
    unused = [label for label in labels if all(label != task.label for task in made)]
    if unused:
        raise InvalidArgument(f"{section}.labels.{unused[0]}: has no effect, as no task has this label; remove it")
    if not isinstance(job.model, OwnModelConfig):
        if len(made) > 1:
            raise InvalidArgument(f"tasks: model.kind {job.model.kind} has one output; allowed: one task")
        if made[0].loss not in ("bce", "mse"):
            raise InvalidArgument(
                f"tasks.{made[0].name}.loss: {made[0].loss} is not possible with model.kind {job.model.kind}; allowed: "
                "bce, mse"
            )
    return made


def _named(task: Task) -> Task:
    """Returns the task, whose name is the first part of the names of its metrics."""
    if not _NAME.fullmatch(task.name):
        raise not_allowed("tasks", task.name, "names of letters, digits, _ and -, at most 64; a label needs a task")
    return task


def _task(name: str, config: TaskConfig, labels: tuple[str, ...]) -> Task:
    label = config.label or (name if name in labels or not labels else labels[0] if len(labels) == 1 else name)
    if config.label is not None and not labels:
        raise InvalidArgument(
            f"tasks.{name}.label: has no effect, as the data have one label; remove it, or name labels in "
            "data.columns.labels or data.csv.labels"
        )
    if labels and label not in labels:
        raise InvalidArgument(f"tasks.{name}.label: there is no label {label!r}; allowed: {', '.join(labels)}")
    if config.item is not None and config.loss != "in_batch_softmax":
        raise InvalidArgument(f"tasks.{name}.item: has no effect with loss {config.loss}; remove it")
    return Task(name, label, config.loss, config.weight, config.item)
