"""The outputs of a job's model by task, and their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...proto.config.tasks_config import Task
from ...proto.errors import InvalidArgument
from ..data import Batch, NamedPart
from ..metrics.item_frequency import ItemFrequency
from ..metrics.losses import LOSSES, Loss, check_labels, in_batch_softmax, undo_downsampling_of_logits
from .own_loss import OwnLoss

_DIMS = {"bce": (1, "(B)"), "mse": (1, "(B)")}
_MATRIX = (2, "(B, C)")


class TaskOutputs:
    """What a job makes of the outputs of its model.

    Args:
        tasks: the tasks, at least one.
        negatives_keep: the share of negatives that training keeps.

    Attributes:
        tasks: the tasks.
        losses: the loss of each task by its name.
        shown: the task whose logits and labels are followed while training: the first one with the metrics of binary
            cross entropy; None: there is none.

    Raises:
        InvalidArgument: a loss of the user's own cannot be imported; see :class:`OwnLoss`.
    """

    def __init__(self, tasks: Sequence[Task], negatives_keep: float = 1.0) -> None:
        self.tasks = tuple(tasks)
        self._keep = negatives_keep
        self.losses: Mapping[str, Loss] = {
            task.name: OwnLoss(task) if task.has_own_loss else LOSSES[task.loss] for task in self.tasks
        }
        counted = [task for task in self.tasks if task.item is not None and task.negatives is None]
        self._frequencies = {task.name: ItemFrequency() for task in counted}
        self.shown = next((task for task in self.tasks if task.judged_as == "bce"), None)

    def of(self, out: Any, samples: int) -> dict[str, Tensor]:
        """Returns the output of each task in float32.

        Args:
            out: what the model returned: a tensor for a single task, or a mapping of a tensor for each task.
            samples: the number of samples, B.

        Raises:
            InvalidArgument: an output is missing, there is one too many, or its shape is not that of its loss.
        """
        if isinstance(out, Tensor) and len(self.tasks) == 1:
            out = {self.tasks[0].name: out}
        names = [task.name for task in self.tasks]
        if not isinstance(out, Mapping):
            allowed = "a tensor" if len(names) == 1 else f"a mapping of a tensor for each of {', '.join(names)}"
            raise InvalidArgument(f"model: forward returned {type(out).__name__}; allowed: {allowed}")
        if set(out) != set(names):
            raise InvalidArgument(
                f"model: forward returned outputs for {', '.join(map(str, out)) or 'nothing'}; the tasks are "
                f"{', '.join(names)}"
            )
        return {task.name: _checked(task, out[task.name], samples).float() for task in self.tasks}

    def corrected(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs as if training had kept all negatives (He et al. 2014, section 6.3)."""
        if self._keep == 1:
            return dict(outputs)
        return {name: undo_downsampling_of_logits(output, self._keep) for name, output in outputs.items()}

    def loss(self, outputs: Mapping[str, Tensor], part: NamedPart) -> Tensor:
        """Returns the weighted sum of the tasks' losses over some samples, a scalar.

        Without samples it is 0, with gradients of 0: a worker with an empty batch takes part in a step as well.

        Args:
            outputs: the outputs by task.
            part: the samples.
        """
        if not len(part):
            return sum_of([output.sum() for output in outputs.values()])
        return sum_of([task.weight * self._loss_of(task, outputs[task.name], part) for task in self.tasks])

    def _loss_of(self, task: Task, output: Tensor, part: NamedPart) -> Tensor:
        labels = part.label(task.label)
        if task.negatives is not None:
            rewards = labels if part.weights is None else labels * part.weights
            return self.losses[task.name](output, torch.zeros_like(labels), rewards)
        _check_candidates(task, output, part)
        if task.item is None:
            return self.losses[task.name](output, labels, part.weights)
        keys = part.tensors[task.item]
        assert isinstance(keys, Tensor)
        logq = self._frequencies[task.name].update(keys)
        return in_batch_softmax(output, labels, part.weights, logq=logq, items=keys)

    def state_dict(self) -> dict[str, Any]:
        """Returns how often this worker saw the items of each task that counts them, for a checkpoint."""
        return {name: frequency.state_dict() for name, frequency in self._frequencies.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a result of :meth:`state_dict`; a task that is not there begins without counts."""
        for name in self._frequencies.keys() & state.keys():
            self._frequencies[name].load_state_dict(state[name])

    def check(self, batch: Batch) -> None:
        """Checks the labels of a batch on the host, before the losses read them.

        Raises:
            InvalidArgument: a label is outside of what the loss of its task takes; the text has the value.
        """
        for task in self.tasks:
            try:
                check_labels(_rule_of(task), batch.label(task.label), are_rewards=task.negatives is not None)
            except ValueError as error:
                raise InvalidArgument(f"tasks.{task.name}: {error}") from None


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of scalars, at least one."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _check_candidates(task: Task, output: Tensor, part: NamedPart) -> None:
    """Checks that labels are candidates; on a device torch does it, as a look at them would wait for it."""
    if _rule_of(task) in ("softmax", "bpr") and output.device.type == "cpu":
        try:
            check_labels(_rule_of(task), part.label(task.label), candidates=output.shape[1])
        except ValueError as error:
            raise InvalidArgument(f"tasks.{task.name}: {error}") from None


def _rule_of(task: Task) -> str:
    """Returns the loss of this package whose labels and outputs a task has."""
    return task.judged_as if task.has_own_loss else task.loss


def _checked(task: Task, output: Any, samples: int) -> Tensor:
    dims, shape = _DIMS.get(task.judged_as, _MATRIX)
    rule = f"metrics {task.metrics}" if task.has_own_loss else f"loss {task.loss}"
    if not isinstance(output, Tensor) or output.dim() != dims or len(output) != samples:
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InvalidArgument(
            f"tasks.{task.name}: forward returned {found} for {samples} samples; allowed with {rule}: {shape}"
        )
    if task.candidates is None:
        return output
    if output.shape[1] < task.candidates:
        raise InvalidArgument(
            f"tasks.{task.name}.negatives: forward returned {tuple(output.shape)} for {samples} samples of "
            f"{task.candidates} candidates; allowed: a logit for each candidate, the first of which is the positive"
        )
    return output[:, : task.candidates]  # a model may have places for more
