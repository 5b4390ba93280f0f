"""Runs a step of a job: forward and backward of its micro-batches, then the backend's update, or none.

    parts of batch ── forward, loss, backward (DDP silent) ──> ... last one (DDP reduces) ──> backend.step ──> schedule

Invariants:
 1. All ranks make the same collective calls, whatever their losses, so that no rank waits for ever.
 2. The gradients are those of one mean over the step's samples, however the step is cut into parts, and where workers
    meet, however its samples are spread over them.
 3. A loss with NaN or Inf refuses the step on every rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ...proto.config.train_config import TrainConfig
from ...proto.errors import InvalidArgument
from ..data import NamedBatch, NamedPart
from ..session.step import NonFiniteGradient
from .learning_rates import LearningRates
from .parallel_towers import check_reduced
from .process_group import WorkerGroup
from .sample_share import NOTHING_DUE, Due, SampleShare
from .task_outputs import TaskOutputs
from .training_backend import TrainingBackend

# Gives (mean loss, logits (B) float32, labels (B) float32), all on the host.
Shown: TypeAlias = Callable[[], tuple[float, torch.Tensor, torch.Tensor]]
_AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        logits: the logits of this rank's samples for the task that is shown, (B) float32 on the host, without gradient;
            (0) where no task has metrics of binary cross entropy.
        labels: the labels of that task, of the same shape.
        loss: the mean loss over this rank's samples; it may be NaN or Inf when the step was refused.
        is_taken: whether the step was taken, and not refused; every rank has the same value. With ``train.quorum``,
            whether this worker is a member of the step.
        due: what the first worker found due before the step, where workers ask; every rank has the same value.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    loss: float
    is_taken: bool
    due: Due = NOTHING_DUE


class TrainingStep:
    """Runs the steps of a job on one worker.

    Args:
        train: the options of the steps.
        model: the model in train mode; wrapped in DDP when workers reduce dense gradients by DDP.
        backend: the backend, whose ``start`` was called.
        group: this worker and its peers.
        outputs: the tasks of the model.

    Attributes:
        rates: the schedules of the learning rates.
        scaler: the scaler of the loss with amp float16; else None.
        refused: the number of steps so far that were not taken.
        number: the number of steps so far, with those that were refused, or made without this worker.
        outside: the number of steps so far that had their quorum without this worker, with those that it passed over.
    """

    def __init__(
        self,
        train: TrainConfig,
        *,
        model: nn.Module,
        backend: TrainingBackend,
        group: WorkerGroup,
        outputs: TaskOutputs,
    ) -> None:
        self._train, self._model, self._backend, self._group, self._outputs = train, model, backend, group, outputs
        self._device = group.device
        self.scaler = GradScaler(self._device.type) if train.amp == "float16" else None
        self.rates = LearningRates(train.schedule, backend.optimizers)
        self.refused = 0
        self.number = 0
        self.outside = 0
        self._to_pass = 0  # steps that the job has made without this worker, and whose batches it has still to drop
        self._samples = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts of steps and samples, and of the items of tasks that count them."""
        counts = {"number": self.number, "refused": self.refused, "samples": self._samples, "outside": self.outside}
        return {**counts, "items": self._outputs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues the counts from a result of :meth:`state_dict`."""
        self.number, self.refused, self._samples = state["number"], state["refused"], state["samples"]
        self.outside = state.get("outside", 0)
        self._outputs.load_state_dict(state.get("items", {}))

    def run(self, batch: NamedBatch, *, due: Due | None = None) -> StepResult:
        """Runs one step over a batch of up to ``batch_size * accumulate`` samples.

        An empty batch takes part in the step as well.

        Args:
            batch: the batch.
            due: what this worker finds due; None: no worker asks.

        Raises:
            InvalidArgument: the loss is not finite, and ``on_nonfinite`` is "raise". Nothing was applied.
            NonFiniteGradient: a gradient of this rank or another is not finite. Nothing was applied.
            SparserowError: a server or a peer has failed.
        """
        parts = batch.micro_batches
        share = SampleShare(len(batch), self._group, due or NOTHING_DUE)
        logits, labels, losses = [], [], []
        for index, part in enumerate(parts):
            with self._silent_ddp() if index + 1 < len(parts) else contextlib.nullcontext():
                part_logits, part_loss = self._forward_backward(part, len(part) / max(len(batch), 1), share)
            logits.append(part_logits)
            labels.append(part_logits if self._outputs.shown is None else part.label(self._outputs.shown.label))
            losses.append(part_loss)
        if isinstance(self._model, DistributedDataParallel):
            check_reduced(self._model)
        shown = self._shown(losses, torch.cat(logits), torch.cat(labels))
        is_taken = self._end(shown)
        self._samples += len(batch) if is_taken else 0
        self.number += 1
        loss, on_host, of_task = shown()
        return StepResult(on_host, of_task, loss, is_taken, NOTHING_DUE if due is None else share.due)

    def pass_over(self, steps: int) -> None:
        """Has the batches of the next steps dropped, on all ranks alike."""
        self._to_pass += steps

    def passes_over(self) -> bool:
        """Whether the batch of the next step is dropped, as the job has made the step without this worker.

        So all workers are at the same place of their data, and of the schedule, in the same step. No step is passed
        over in a checkpoint, since those who made the steps wait there.
        """
        if self._to_pass == 0:
            return False
        self._to_pass -= 1
        self.number += 1
        self.rates.step()
        return True

    def _shown(self, losses: list[torch.Tensor], logits: torch.Tensor, labels: torch.Tensor) -> Shown:
        """Returns what gives the sum of the losses, the logits and the labels on the host.

        From a device they come with the gradients of the rows, so the call belongs behind the step's end.
        """
        session = self._backend.session
        if self._device.type == "cpu" or session is None:
            return lambda: (sum(float(loss) for loss in losses), logits.cpu(), labels.cpu())
        carried = session.core.on_device.carry(torch.cat([torch.stack(losses), logits, labels]))

        def shown() -> tuple[float, torch.Tensor, torch.Tensor]:
            values = carried.values()
            first, second = len(losses), len(losses) + len(logits)
            return sum(values[:first].tolist()), values[first:second], values[second:]

        return shown

    def _forward_backward(
        self, part: NamedPart, share: float, of_all: SampleShare
    ) -> tuple[torch.Tensor, torch.Tensor]:
        trace, amp = self._backend.trace, self._train.amp
        cast = (
            contextlib.nullcontext() if amp == "none" else torch.autocast(self._device.type, _AMP_DTYPES[amp])
        )  # fmt: skip
        with trace.span("forward", step=self.number), cast:
            out = self._model(**part.tensors)
        outputs = self._outputs.of(out, len(part))
        loss = self._outputs.loss(outputs, part) * (share if len(part) else 1.0)
        value = loss.detach()
        loss = of_all.weigh(loss)
        if value.device.type != "cpu":
            loss = loss * torch.where(torch.isfinite(value), 1.0, math.nan)  # without waiting for the device
        elif not math.isfinite(value):
            loss = loss * math.nan  # an infinite loss may have finite gradients; NaN reaches every rank
        with trace.span("backward", step=self.number):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        shown = self._outputs.shown
        return value.new_empty(0) if shown is None else outputs[shown.name].detach(), value

    def _end(self, shown: Shown) -> bool:
        try:
            with self._backend.trace.span("step", step=self.number):
                is_taken = self._backend.step(self.scaler)
        except NonFiniteGradient:
            loss = shown()[0]
            if math.isfinite(loss):
                raise
            raise self._diverged(loss) from None
        if is_taken:
            self.rates.step()
            return True
        passed = self._backend.passed_over()
        if passed is not None:
            self.rates.step()
            self._to_pass = passed
            self.outside += 1 + passed
            return False
        self.refused += 1
        # Reached only with a scaler or on_nonfinite=skip, on all ranks alike; a scaler cannot repair a loss.
        loss = shown()[0]
        if self._train.on_nonfinite == "raise" and self._group.total(int(not math.isfinite(loss))):
            raise self._diverged(loss)
        return False

    def _diverged(self, loss: float) -> InvalidArgument:
        whose = f"the loss is {loss}" if not math.isfinite(loss) else "the loss of another rank is not finite"
        own = "".join(f" (tasks.{task.name}.loss: {task.loss})" for task in self._outputs.tasks if task.has_own_loss)
        return InvalidArgument(
            f"train: {whose}{own} after {self._samples} samples; lower the learning rates, or skip such steps "
            "(train.on_nonfinite=skip)"
        )

    @contextlib.contextmanager
    def _silent_ddp(self) -> Iterator[None]:
        if isinstance(self._model, DistributedDataParallel):
            with self._model.no_sync():
                yield
        else:
            yield
