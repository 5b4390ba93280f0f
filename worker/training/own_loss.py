"""A function of the user's own as the loss of a task."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...proto.config.tasks_config import Task
from ...proto.errors import InvalidArgument
from .own_module import imported, nearest_of
from .user_errors import is_of_others, line_of_error, place_of

_TRIED_SAMPLES, _TRIED_CANDIDATES = 4, 4


class OwnLoss:
    """The loss of a task whose ``loss`` is MODULE:FUNCTION, called as those of worker/metrics/losses.py are.

    The function takes (scores, labels) and returns a loss for each sample. Scores are float32, (B), or (B, C) with
    metrics softmax; labels are (B) float32, or int64 with metrics softmax. B is at least 1. This class multiplies the
    losses by the weights of the samples and divides their sum by B. So the gradient of a step is the same however its
    samples are cut into micro-batches or spread over workers, and no function can leave weights out.

    Args:
        task: the task.

    Raises:
        InvalidArgument: the module cannot be imported, has no such function, or the function takes other arguments or
            has parameters.
    """

    def __init__(self, task: Task) -> None:
        self._task, self._setting = task, f"tasks.{task.name}.loss"
        module_name, _, name = task.loss.rpartition(":")
        module = imported(self._setting, module_name)
        found = getattr(module, name, None)
        if not callable(found) or inspect.isclass(found):
            own = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
            raise InvalidArgument(f"{self._setting}: {module_name} has no function {name}{nearest_of(name, own)}")
        self._function: Callable[[Tensor, Tensor], Any] = found
        self._check_signature()
        if isinstance(found, nn.Module) and any(each.requires_grad for each in found.parameters()):
            raise InvalidArgument(
                f"{self._setting}: {task.loss} has parameters, which no optimizer trains; allowed: a loss without them "
                "(parameters belong in the model)"
            )

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Computes ``sum over i of w_i l_i, over B``, a float32 scalar; 0 without samples.

        Args:
            logits: the outputs of the task, (B) or (B, C) float32.
            labels: the labels, (B) float32.
            weights: the weight of each sample, (B) float32; None: 1.

        Raises:
            InvalidArgument: the function raises an error, or does not return a loss for each sample.
        """
        if not len(labels):
            return logits.sum()
        losses = self._losses(logits, labels.long() if self._task.judged_as == "softmax" else labels)
        return (losses if weights is None else losses * weights).sum() / len(losses)

    def check(self) -> None:
        """Calls the function on a few made samples, forward and backward, before anything is started for a job.

        Raises:
            InvalidArgument: see :meth:`__call__`; or the function has no gradient.
        """
        columns = {"softmax": self._task.candidates or _TRIED_CANDIDATES}.get(self._task.judged_as, 1)
        # Scores and labels between 0 and 1, because losses of logits, of probabilities and of rates all take them.
        scores = torch.linspace(0.1, 0.9, _TRIED_SAMPLES * columns).reshape(_TRIED_SAMPLES, columns)
        numbers = torch.arange(_TRIED_SAMPLES)
        labels = {"softmax": numbers % columns, "bce": numbers % 2, "mse": (numbers + 1) / _TRIED_SAMPLES}
        given = labels[self._task.judged_as].float()
        if self._task.negatives is not None:
            given = torch.zeros_like(given)
        scores = (scores if self._task.judged_as == "softmax" else scores[:, 0]).requires_grad_()
        loss = self(scores, given)
        try:
            loss.backward()
        except Exception as error:  # the code of a function may raise anything
            raise self._raised(error, "raised in its backward") from error
        if scores.grad is None:
            raise self._refused("losses whose gradient does not reach the scores")

    def _losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        before = scores._version, labels._version
        try:
            found = self._function(scores, labels)
        except Exception as error:  # the code of a function may raise anything
            if is_of_others(error):
                raise
            raise self._raised(error, "raised") from error
        if (scores._version, labels._version) != before:  # because metrics and other tasks read them afterwards
            raise InvalidArgument(
                f"{self._setting}: {self._task.loss} changed its scores or labels in place; allowed: new tensors"
            )
        if not isinstance(found, Tensor):
            raise self._refused(type(found).__name__)
        if found.shape != labels.shape or found.dtype != torch.float32 or found.device != scores.device:
            what = f"{tuple(found.shape)} {str(found.dtype).removeprefix('torch.')} on {found.device}"
            raise self._refused(f"{what} for {len(labels)} samples")
        if scores.requires_grad and not found.requires_grad:
            raise self._refused("losses without a gradient")
        return found

    def _check_signature(self) -> None:
        try:
            inspect.signature(self._function).bind(None, None)
        except TypeError:
            raise InvalidArgument(
                f"{self._setting}: {self._task.loss} takes {inspect.signature(self._function)}; allowed: a function of "
                "(scores, labels), as the weights of samples are applied to the losses that it returns"
            ) from None
        except ValueError:  # a function of C has none
            return

    def _refused(self, found: str) -> InvalidArgument:
        return InvalidArgument(
            f"{self._setting}: {self._task.loss} returned {found}; allowed: a loss for each sample, (B) float32 on the "
            "device of the scores, with a gradient"
        )

    def _raised(self, error: Exception, what: str) -> InvalidArgument:
        line = line_of_error(error, place_of(error, self._task.loss))
        return InvalidArgument(f"{self._setting}: {self._task.loss} {what} {line}")
