"""Computes exact metrics of a model on a whole test set, over all workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ..data import ClickReader, StepBatch
from ..metrics.binary import auc, log_loss
from ..metrics.losses import LOSSES
from .process_group import WorkerGroup
from .task_outputs import TaskOutputs

# The outputs and the labels of a task, each (n) float32.
Scores = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one pass over the test files.

    Attributes:
        auc: the exact area under the ROC curve of the first task with binary cross entropy, in which ties count half;
            NaN when a class is absent, or no task has that loss.
        log_loss: the mean log loss of that task, in nats.
        samples: the number of samples.
        metrics: the metrics of each task by ``TASK.METRIC``: ``auc`` and ``log_loss`` with binary cross entropy,
            ``mse`` with squared error, and ``loss`` with another loss.
    """

    auc: float
    log_loss: float
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def evaluate(
    model: nn.Module,
    reader: ClickReader,
    group: WorkerGroup,
    outputs: TaskOutputs,
    placed: Callable[[StepBatch], StepBatch] = lambda batch: batch,
    *,
    forwards_meet: bool = False,
) -> Evaluation:
    """Scores every sample once; all ranks get the same result.

    The outputs of a task are gathered on rank 0, 8 bytes a sample. The model is in eval mode meanwhile, so distributed
    tables are read without a clock. Its mode is restored.

    Args:
        model: the model.
        reader: the reader of this worker's share of the test files.
        group: this worker and its peers; every rank calls this function.
        outputs: the tasks of the model.
        placed: gives a batch on the model's device.
        forwards_meet: whether a forward has collective calls, so that each rank makes equally many.
    """
    was_training = model.training
    model.eval()
    scores = _Scores(outputs)
    try:
        with torch.no_grad():
            for batch in reader:
                if len(batch) or forwards_meet:
                    for part in placed(batch).parts(max(len(batch), 1)):
                        positional, named = part.arguments
                        made = outputs.of(model(*positional, **named), len(part))
                        scores.add(outputs.corrected(made), part)
    finally:
        model.train(was_training)
    return scores.evaluation(group)


class _Scores:
    """The outputs and labels of this rank's samples by task; sums of losses where a task has no output a sample."""

    def __init__(self, outputs: TaskOutputs) -> None:
        self._outputs = outputs
        empty = np.empty(0, np.float32)
        self._parts: dict[str, list[Scores]] = {task.name: [(empty, empty)] for task in outputs.tasks}
        self._losses: dict[str, float] = {task.name: 0.0 for task in outputs.tasks}
        self._samples = 0

    def add(self, outputs: Mapping[str, torch.Tensor], part: Any) -> None:
        self._samples += len(part)
        for task in self._outputs.tasks:
            labels = part.label(task.label)
            if task.loss in ("bce", "mse"):
                self._parts[task.name].append((outputs[task.name].cpu().numpy(), labels.cpu().numpy()))
            elif len(part):
                self._losses[task.name] += len(part) * float(LOSSES[task.loss](outputs[task.name], labels, None))

    def evaluation(self, group: WorkerGroup) -> Evaluation:
        """Returns the metrics over all ranks, which all call it."""
        metrics: dict[str, float] = {}
        samples = group.total(self._samples)
        for task in self._outputs.tasks:
            if task.loss not in ("bce", "mse"):
                total = sum(group.collect(self._losses[task.name]))
                metrics[f"{task.name}.loss"] = total / samples if samples else float("nan")
                continue
            outputs, labels = (group.gather(np.concatenate(part)) for part in zip(*self._parts[task.name], strict=True))
            if outputs is None or labels is None:
                continue
            if task.loss == "bce":
                metrics[f"{task.name}.auc"] = auc(outputs, labels)
                metrics[f"{task.name}.log_loss"] = log_loss(outputs, labels)
            else:
                error = np.square(outputs.astype(np.float64) - labels)
                metrics[f"{task.name}.mse"] = float(error.mean()) if len(error) else float("nan")
        metrics = group.share(metrics)
        shown = self._outputs.shown
        name = "" if shown is None else shown.name
        nan = float("nan")
        return Evaluation(metrics.get(f"{name}.auc", nan), metrics.get(f"{name}.log_loss", nan), samples, metrics)
