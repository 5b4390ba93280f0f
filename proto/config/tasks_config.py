"""The section ``tasks`` of a job file: what each output of the model is trained for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from ..errors import InvalidArgument, not_allowed
from ..features.kinds import IdFeature
from .config import StrictModel

if TYPE_CHECKING:
    from .job import JobConfig

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
LossName: TypeAlias = Literal["bce", "mse", "softmax", "bpr", "in_batch_softmax"]


class NegativesConfig(StrictModel):
    """Items that are drawn as negatives of a sample's item, anew in each epoch."""

    kind: Literal["uniform", "popularity", "in_batch"] = Field(
        description="uniform: every item alike. popularity: as often as it is in the training files. in_batch: the "
        "items of a worker's step. Items are the lines of the feature's vocabulary, or the keys in the training files."
    )
    per_positive: int = Field(ge=1, le=65536, description="Negatives of a sample.")


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
        "item is in a batch (logQ), and samples of one item are no negatives of each other; null: neither. For "
        "negatives: the positive.",
    )
    negatives: NegativesConfig | None = Field(
        None,
        description="Negatives for softmax and bpr: the feature of item becomes a list of candidates, the sample's own "
        "item first, and the label the reward of the sample, at least 0. null: the data have candidates.",
        json_schema_extra={"allowed": "a section with kind and per_positive"},
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
        negatives: how negatives of the item are drawn; None: none are.
    """

    name: str
    label: str
    loss: LossName = "bce"
    weight: float = 1.0
    item: str | None = None
    negatives: NegativesConfig | None = None

    @property
    def candidates(self) -> int | None:
        """The number of candidates of a sample; None: the data or the batch decide."""
        return None if self.negatives is None else self.negatives.per_positive + 1


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
    _check_negatives(made, job)
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
    if config.negatives is not None:
        if config.loss not in ("softmax", "bpr"):
            raise InvalidArgument(
                f"tasks.{name}.negatives: is not possible with loss {config.loss}; allowed: softmax, bpr"
            )
        if config.item is None:
            raise InvalidArgument(f"tasks.{name}.item: is missing; tasks.{name}.negatives needs the item of a sample")
    elif config.item is not None and config.loss != "in_batch_softmax":
        raise InvalidArgument(f"tasks.{name}.item: has no effect with loss {config.loss} without negatives; remove it")
    return Task(name, label, config.loss, config.weight, config.item, config.negatives)


def _check_negatives(tasks: Sequence[Task], job: JobConfig) -> None:
    """Raises InvalidArgument when negatives cannot be drawn for the tasks of a job."""
    drawing = [task for task in tasks if task.negatives is not None]
    if len(drawing) > 1:
        raise InvalidArgument(
            f"tasks.{drawing[1].name}.negatives: tasks.{drawing[0].name} has negatives too; allowed: one task with them"
        )
    for task in drawing:
        other = next((each for each in tasks if each.item == task.item and each is not task), None)
        if other is not None:
            raise InvalidArgument(
                f"tasks.{other.name}.item: {task.item!r} becomes a list of candidates by tasks.{task.name}.negatives; "
                "allowed: another feature"
            )
        ids = [feature.name for feature in job.data.features if isinstance(feature, IdFeature)]
        if task.item not in ids:
            raise not_allowed(f"tasks.{task.name}.item", task.item, f"a feature of kind id: {', '.join(ids) or 'none'}")
