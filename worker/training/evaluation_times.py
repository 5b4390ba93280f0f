"""When a job is tested within an epoch (``train.test_every``), and the order of all evaluations of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...proto.config.train_config import TrainConfig
from .process_group import WorkerGroup
from .training_report import EpochResult, Evaluated, EvaluationPoint


class EvaluationTimes:
    """Decides after which steps a job is tested. Where workers meet, all decide alike, and else the first one alone.

    Args:
        train: the options of the steps.
        group: this worker and its peers.
    """

    def __init__(self, train: TrainConfig, group: WorkerGroup) -> None:
        self._group, self._every = group, train.test_every
        self._steps: int | None = None
        if self._every is not None and self._every.samples is not None:
            self._steps = -(-self._every.samples // (train.batch_size * train.accumulate * group.world))
        elif self._every is not None:
            self._steps = self._every.steps
        self.restart()

    def restart(self) -> None:
        """Begins to count the seconds anew, when training begins or goes on after a test."""
        self._since = time.monotonic()

    @property
    def by_clock(self) -> bool:
        """Whether the first worker's clock says when a test is due."""
        return self._every is not None and self._every.seconds is not None

    @property
    def is_over(self) -> bool:
        """Whether the seconds between two tests are over, on the first worker, which finds it for all."""
        seconds = None if self._every is None else self._every.seconds
        return seconds is not None and self._group.is_first and time.monotonic() - self._since >= seconds

    def is_due(self, number: int, *, is_over: bool) -> bool:
        """Returns whether this worker tests the model now.

        Args:
            number: the number of steps of the run so far.
            is_over: what the workers agreed on of :attr:`is_over` in the last of them.
        """
        if self._every is None or not (self._group.meets or self._group.is_first):
            return False
        return is_over if self._steps is None else number % self._steps == 0


def in_order(history: Sequence[EpochResult], points: Sequence[EvaluationPoint]) -> list[Evaluated]:
    """Returns the evaluations of a run in the order in which they were made.

    One after the last step of an epoch is left out, as that at the end of the epoch is of the same model.

    Args:
        history: the results of the epochs.
        points: the evaluations within epochs.
    """
    ends = {(each.epoch, each.step) for each in history}
    within = [each for each in points if (each.epoch, each.step) not in ends]
    return sorted((*within, *history), key=lambda each: (each.epoch, isinstance(each, EpochResult)))
