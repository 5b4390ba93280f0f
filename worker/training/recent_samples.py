"""The figures of recent samples that a run shows while it trains."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ..metrics.binary import auc
from .training_step import StepResult

_OBSERVED_SAMPLES = 20_000


class RecentSamples:
    """The loss and the AUC over about the last 20,000 samples of this rank, each predicted before it was trained on."""

    def __init__(self) -> None:
        self._parts: deque[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], float, int]] = deque()
        self._samples = 0

    def add(self, result: StepResult, samples: int) -> None:
        """Adds a step that was taken, of so many samples of this rank."""
        self._parts.append((result.logits.numpy(), result.labels.numpy(), result.loss, samples))
        self._samples += samples
        while self._samples - self._parts[0][3] >= _OBSERVED_SAMPLES:
            self._samples -= self._parts.popleft()[3]

    def figures(self) -> tuple[float, float]:
        """Returns (loss, AUC); both are NaN before the first sample."""
        if not self._samples:
            return float("nan"), float("nan")
        logits, labels, losses, samples = zip(*self._parts, strict=True)
        mean = float(np.average(losses, weights=samples))
        return mean, auc(np.concatenate(logits), np.concatenate(labels))
