"""The tasks of a job: its section ``tasks``, with what the labels and the features of its data allow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

from ..errors import InvalidArgument, not_allowed
from ..features.kinds import IdFeature
from .job_sections import JobSections
from .tasks_config import MetricsName, Task, TaskConfig

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def tasks_of_job(job: JobSections) -> tuple[Task, ...]:
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
    task = Task(name, label, config.loss, config.weight, config.item, config.negatives, config.metrics)
    _check_metrics(task)
    if config.negatives is not None:
        if task.judged_as != "softmax" or config.loss == "in_batch_softmax":
            given = f"metrics {config.metrics}" if task.has_own_loss else f"loss {config.loss}"
            raise InvalidArgument(
                f"tasks.{name}.negatives: is not possible with {given}; allowed: softmax, bpr, or a loss of one's own "
                "with metrics softmax"
            )
        if config.item is None:
            raise InvalidArgument(f"tasks.{name}.item: is missing; tasks.{name}.negatives needs the item of a sample")
    elif config.item is not None and config.loss != "in_batch_softmax":
        raise InvalidArgument(f"tasks.{name}.item: has no effect with loss {config.loss} without negatives; remove it")
    return task


def _check_metrics(task: Task) -> None:
    """Raises InvalidArgument unless the job names the metrics of a task exactly where its loss is the user's own."""
    if task.has_own_loss and task.metrics is None:
        raise InvalidArgument(
            f"tasks.{task.name}.loss: {task.loss} needs tasks.{task.name}.metrics, as a function names none; allowed: "
            f"{', '.join(get_args(MetricsName))}"
        )
    if task.metrics is not None and not task.has_own_loss:
        raise InvalidArgument(
            f"tasks.{task.name}.metrics: has no effect with loss {task.loss}, which has its own; remove it"
        )


def _check_negatives(tasks: Sequence[Task], job: JobSections) -> None:
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
