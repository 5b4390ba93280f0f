"""How fast a worker trains between two of its heartbeats, so that a status that is read between them has figures."""

from __future__ import annotations

import math

from ....proto import control_pb2 as pb

_LEAST_SEC = 0.5  # between two heartbeats; one that was sent again at once measures nothing


class TrainingRate:
    """The figures of a worker's training, as it says with its heartbeats.

    Attributes:
        figures: what it said last; numbers that no worker can measure are left out.
        samples_per_sec: the samples per second between its last two heartbeats; None: it has trained on none yet, or
            does not say.
        loss: the mean loss of those samples; None: there were none, or none whose loss is a number.
    """

    def __init__(self) -> None:
        self.figures = pb.TrainingFigures()
        self.samples_per_sec: float | None = None
        self.loss: float | None = None
        self._before: tuple[float, pb.TrainingFigures] | None = None

    def note(self, figures: pb.TrainingFigures, now: float) -> None:
        """Notes what a heartbeat says.

        Args:
            figures: what the worker says of its training.
            now: the present time, in seconds.
        """
        self.figures = _plausible(figures)
        if self._before is None:
            self._before = now, self.figures
            return
        at, before = self._before
        if now - at < _LEAST_SEC:
            return
        self._before = now, self.figures
        samples = self.figures.samples - before.samples
        measured = self.figures.measured - before.measured
        self.samples_per_sec = max(0, samples) / (now - at) if self.figures.samples else None
        loss = (self.figures.loss_sum - before.loss_sum) / measured if measured > 0 else math.inf
        self.loss = loss if math.isfinite(loss) else None


def _plausible(figures: pb.TrainingFigures) -> pb.TrainingFigures:
    kept = pb.TrainingFigures()
    kept.CopyFrom(figures)
    if not math.isfinite(kept.loss_sum):
        kept.measured, kept.loss_sum = 0, 0.0
    if not 0 <= kept.auc <= 1:
        kept.ClearField("auc")
    if not math.isfinite(kept.test_value):
        kept.test_metric, kept.test_value = "", 0.0
    return kept
