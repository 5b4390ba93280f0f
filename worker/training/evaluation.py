"""Computes the metrics of a model on a whole test set, over all workers, in memory that is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...proto.config.metrics_config import MetricsConfig
from ...proto.config.tasks_config import Task
from ...proto.errors import InvalidArgument
from ..data import ClickReader, NamedBatch, NamedPart
from ..metrics.grouped import GroupedScores
from ..metrics.losses import Loss, in_batch_softmax
from ..metrics.task_metrics import BinaryMetrics, ErrorMetrics, RankMetrics
from .process_group import WorkerGroup
from .task_outputs import TaskOutputs

TaskMetrics: TypeAlias = BinaryMetrics | ErrorMetrics | RankMetrics


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one pass over the test files.

    Attributes:
        auc: the area under the ROC curve of the first task with metrics of binary cross entropy, in which ties count
            half; NaN when a class is absent, or no task has them.
        log_loss: the mean log loss of that task, in nats.
        samples: the number of samples.
        metrics: the metrics of each task by ``TASK.METRIC``; see worker/metrics/task_metrics.py. With a column of
            groups, tasks with metrics of binary cross entropy have ``gauc`` too.
    """

    auc: float
    log_loss: float
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def shown(self) -> tuple[str, float]:
        """The metric by which the status shows the test, and its value: the AUC, or the first one that is a number."""
        metrics = {"auc": self.auc, **self.metrics}
        return next(((name, value) for name, value in metrics.items() if math.isfinite(value)), ("", math.nan))


def evaluate(
    model: nn.Module,
    reader: ClickReader[NamedBatch],
    group: WorkerGroup,
    outputs: TaskOutputs,
    config: MetricsConfig,
    placed: Callable[[NamedBatch], NamedBatch] = lambda batch: batch,
    *,
    forwards_meet: bool = False,
) -> Evaluation:
    """Scores every sample once; all ranks get the same result.

    The model is in eval mode meanwhile, so distributed tables are read without a clock. Its mode is restored.

    Args:
        model: the model.
        reader: the reader of this worker's share of the test files.
        group: this worker and its peers; every rank calls this function.
        outputs: the tasks of the model.
        config: what is measured.
        placed: gives a batch on the model's device.
        forwards_meet: whether a forward has collective calls, so that each rank makes equally many.

    Raises:
        InvalidArgument: an output does not fit its task, a label is no candidate, or there are too many groups.
    """
    was_training = model.training
    model.eval()
    scores = _Scores(outputs, config)
    try:
        with torch.no_grad():
            for batch in reader:
                if len(batch) or forwards_meet:
                    for part in placed(batch).micro_batches:
                        made = outputs.of(model(**part.tensors), len(part))
                        scores.add(outputs.corrected(made), part)
    finally:
        model.train(was_training)
    return scores.evaluation(group)


class _Scores:
    """The metrics of this rank's samples by task."""

    def __init__(self, outputs: TaskOutputs, config: MetricsConfig) -> None:
        self._outputs, self._config = outputs, config
        self._metrics: dict[str, TaskMetrics] = {task.name: _metrics_of(task, config) for task in outputs.tasks}
        self._groups: dict[str, GroupedScores] = {}
        self._samples = 0

    def add(self, outputs: Mapping[str, Tensor], part: NamedPart) -> None:
        if not len(part):
            return
        self._samples += len(part)
        given = part.weights if self._config.weighted else None
        weights = None if given is None else given.cpu().numpy()
        for task in self._outputs.tasks:
            metrics, labels = self._metrics[task.name], part.label(task.label).cpu().numpy()
            output = outputs[task.name]
            if isinstance(metrics, RankMetrics):
                _add_ranks(task, self._outputs.losses[task.name], metrics, output, part, given)
                continue
            scores = output.cpu().numpy()
            metrics.add(scores, labels, weights)
            if task.judged_as == "bce" and part.groups is not None:
                groups = self._groups.setdefault(task.name, GroupedScores())
                groups.add(part.groups.cpu().numpy(), scores, labels, weights)

    def evaluation(self, group: WorkerGroup) -> Evaluation:
        """Returns the metrics over all ranks, which all call it."""
        found: dict[str, float] = {}
        for task in self._outputs.tasks:
            parts = group.to_rank(self._metrics[task.name], 0)
            if parts is not None:
                results = type(parts[0]).merged(parts).results()  # type: ignore[arg-type]
                found.update({f"{task.name}.{name}": value for name, value in results.items()})
        gauc = {f"{name}.gauc": self._gauc(group, scores) for name, scores in self._all_groups(group).items()}
        metrics = {**group.share(found, what="evaluation"), **gauc}
        name = "" if self._outputs.shown is None else self._outputs.shown.name
        auc, log_loss = (metrics.get(f"{name}.{metric}", math.nan) for metric in ("auc", "log_loss"))
        return Evaluation(auc, log_loss, group.total(self._samples), metrics)

    def _all_groups(self, group: WorkerGroup) -> dict[str, GroupedScores]:
        """Returns the scores by group of each task for which any rank has some."""
        names = sorted({name for each in group.collect(list(self._groups)) for name in each})
        return {name: self._groups.get(name, GroupedScores()) for name in names}

    def _gauc(self, group: WorkerGroup, scores: GroupedScores) -> float:
        world = 1 if group.is_alone else group.world
        parts = group.exchange(scores.by_rank(world))
        sums = group.collect(GroupedScores().sums(parts))
        most = max(each.groups for each in sums)
        if most > self._config.max_groups:
            raise InvalidArgument(
                f"metrics.max_groups: {most} groups of samples are on one worker; allowed: {self._config.max_groups}"
            )
        samples = sum(each.samples for each in sums)
        return sum(each.weighted for each in sums) / samples if samples else math.nan


def _add_ranks(
    task: Task, loss_of: Loss, metrics: RankMetrics, output: Tensor, part: NamedPart, weights: Tensor | None
) -> None:
    """Adds logits of candidates, (B, C), to the metrics of ranks.

    Where negatives are drawn, the first candidate is the positive, and samples without a reward are left out. In a
    matrix of scores all items are candidates, and samples without a reward have no positive to rank; samples of the
    same item, where it is known, are no candidates of each other.
    """
    labels = part.label(task.label)
    items = part.tensors[task.item] if task.item is not None and task.negatives is None else None
    assert items is None or isinstance(items, Tensor)
    if task.negatives is not None:
        is_rewarded = labels > 0
        output, weights = output[is_rewarded], None if weights is None else weights[is_rewarded]
        labels = torch.zeros(len(output), device=output.device)
    is_ranked: npt.NDArray[np.bool_] | None = None
    if task.loss == "in_batch_softmax":
        is_ranked = (labels > 0).cpu().numpy()
        loss = in_batch_softmax(output, labels, weights, items=items)
        if items is not None:
            is_other = (items[:, None] == items) & ~torch.eye(len(items), dtype=torch.bool, device=items.device)
            output = output.masked_fill(is_other.to(output.device), -math.inf)
        positives = np.arange(len(output))
    else:
        loss = loss_of(output, labels, weights)
        positives = labels.cpu().numpy().astype(np.int64)
    host = None if weights is None else weights.cpu().numpy()
    metrics.add(output.cpu().numpy(), positives, len(output) * float(loss), host, is_ranked)


def _metrics_of(task: Task, config: MetricsConfig) -> TaskMetrics:
    if task.judged_as == "bce":
        return BinaryMetrics()
    return ErrorMetrics() if task.judged_as == "mse" else RankMetrics(config.at)
