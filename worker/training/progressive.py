"""Progressive validation: each batch is predicted before it is trained on, by the forward of its own step.

The metrics are those of the task that a run shows, over windows of samples of all workers, and over the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ...proto.config.train_config import TrainConfig
from ..data.batch import TimeRange
from ..metrics.task_metrics import BinaryMetrics
from .process_group import WorkerGroup
from .training_step import StepResult

# Takes the epoch, the samples of all workers in it so far, the metrics of a window, and the times of its samples.
Report: TypeAlias = Callable[[int, int, Mapping[str, float], TimeRange | None], None]


class ProgressiveMetrics:
    """The metrics of training steps, by windows of equally many steps.

    Every rank of a group that meets takes equally many steps, and so reaches the end of a window at the same step.
    Where they do not meet, windows have equally many samples, since batches of leases and streams differ in size.

    Args:
        window: the number of samples of all workers in a window; it is rounded up to whole steps. Where they do not
            meet it is that of this worker.
        train: the options of the steps.
        group: this worker and its peers.
        report: called with the metrics of each window, on rank 0 of ranks that meet.
    """

    def __init__(self, window: int, train: TrainConfig, group: WorkerGroup, report: Report) -> None:
        steps = -(-window // (train.batch_size * train.accumulate * group.world))
        self._end_at = steps if group.meets else window
        self._group, self._report = group, report
        self._metrics = BinaryMetrics()
        self._count = self._samples = 0
        self._times: TimeRange | None = None

    def add(self, epoch: int, result: StepResult, times: TimeRange | None) -> None:
        """Adds a step; a refused one has no samples.

        Args:
            epoch: the number of the epoch.
            result: the result of the step.
            times: the times of its first and last sample; None: they have none.
        """
        taken = len(result.logits) if result.is_taken else 0
        if taken:
            self._metrics.add(result.logits.numpy(), result.labels.numpy())
            self._samples += taken
            self._times = _joined([self._times, times])
        self._count += 1 if self._group.meets else taken
        if self._count >= self._end_at:
            self._end(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns what this worker has of the epoch and of the window that it is in, for a checkpoint."""
        times = None if self._times is None else list(self._times)
        return {
            "count": self._count,
            "end_at": self._end_at,
            "samples": self._samples,
            "times": times,
            "metrics": self._metrics.state_dict(),
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from a checkpoint.

        Args:
            states: the state of this worker; or those of all workers of a run that had another number of them, which
                the first worker takes together.
        """
        if len(states) > 1 and self._group.rank != 0:
            states = [{**states[0], "samples": 0, "times": None, "metrics": BinaryMetrics().state_dict()}]
        parts = [BinaryMetrics() for _ in states]
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state["metrics"])
        self._metrics = BinaryMetrics.merged(parts)
        self._samples = sum(state["samples"] for state in states)
        self._times = _joined([None if state["times"] is None else tuple(state["times"]) for state in states])
        # Windows of another number of workers have another number of steps; the same share of them is done.
        self._count = min(states[0]["count"] * self._end_at // states[0]["end_at"], self._end_at - 1)

    def end_epoch(self, epoch: int) -> None:
        """Ends the last window of an epoch; every rank calls it."""
        if self._count:
            self._end(epoch)
        self._samples = 0

    def _end(self, epoch: int) -> None:
        parts = self._group.to_rank((self._metrics, self._samples, self._times), 0)
        self._metrics, self._count, self._times = BinaryMetrics(), 0, None
        if parts is not None:
            whole = BinaryMetrics.merged([metrics for metrics, _, _ in parts])
            times = _joined([times for _, _, times in parts])
            self._report(epoch, sum(samples for _, samples, _ in parts), whole.results(), times)


def _joined(ranges: Sequence[TimeRange | None]) -> TimeRange | None:
    there = [each for each in ranges if each is not None]
    return (min(first for first, _ in there), max(last for _, last in there)) if there else None
