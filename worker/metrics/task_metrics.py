"""The metrics of one task over many samples: what is added up on each rank, and what comes of the sums of all.

Every sum may be weighted: a sample of weight w counts as w samples of weight 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .score_counts import ScoreCounts

_BUCKETS = 10


class BinaryMetrics:
    """The metrics of logits and labels in [0, 1], in memory that does not depend on the number of samples.

    ``auc``; ``log_loss`` in nats; ``normalized_entropy``, the log loss by that of the labels' mean (He et al. 2014);
    ``calibration``, the sum of predictions by that of labels; ``calibration[a,b)``, the same for samples whose
    prediction is in a tenth of [0, 1].
    """

    def __init__(self) -> None:
        self._counts = ScoreCounts()
        self._samples = 0.0
        self._loss = 0.0
        self._predicted = np.zeros(_BUCKETS)
        self._labelled = np.zeros(_BUCKETS)

    def add(
        self,
        logits: npt.NDArray[np.float32],
        labels: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Adds samples.

        Args:
            logits: the logits, (n).
            labels: the labels, (n), in [0, 1].
            weights: the weights, (n), at least 0; None: 1.
        """
        x, y, w = logits.astype(np.float64), labels.astype(np.float64), _weights(weights, len(logits))
        self._counts.add(logits, labels, weights)
        self._samples += float(w.sum())
        small = np.exp(-np.abs(x))
        self._loss += float((w * (np.maximum(x, 0) - x * y + np.log1p(small))).sum())
        predicted = np.where(x >= 0, 1.0, small) / (1.0 + small)
        is_number = ~np.isnan(predicted)
        if not is_number.all():
            self._predicted += math.nan  # so that no calibration is that of the other samples alone
        bucket = np.minimum((predicted[is_number] * _BUCKETS).astype(np.int64), _BUCKETS - 1)
        self._predicted += np.bincount(bucket, (w * predicted)[is_number], _BUCKETS)
        self._labelled += np.bincount(bucket, (w * y)[is_number], _BUCKETS)

    def state_dict(self) -> dict[str, Any]:
        """Returns what was added as numbers and arrays."""
        sums = np.array([self._samples, self._loss])
        return {
            "scores": self._counts.state_dict(),
            "sums": sums,
            "predicted": self._predicted.copy(),
            "labelled": self._labelled.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what a result of :meth:`state_dict` has."""
        self._counts.load_state_dict(state["scores"])
        self._samples, self._loss = (float(each) for each in state["sums"])
        self._predicted, self._labelled = np.array(state["predicted"]), np.array(state["labelled"])

    @staticmethod
    def merged(parts: Sequence[BinaryMetrics]) -> BinaryMetrics:
        """Returns the metrics of several together; there is at least one, and they may be changed."""
        whole = BinaryMetrics()
        whole._counts = ScoreCounts.merged([part._counts for part in parts])
        whole._samples = sum(part._samples for part in parts)
        whole._loss = sum(part._loss for part in parts)
        whole._predicted = np.sum([part._predicted for part in parts], axis=0)
        whole._labelled = np.sum([part._labelled for part in parts], axis=0)
        return whole

    def results(self) -> dict[str, float]:
        """Returns the metrics by name; ``auc_error`` is there where the AUC is not exact, and bounds its error."""
        if not self._samples:
            return dict.fromkeys(("auc", "log_loss", "normalized_entropy", "calibration"), math.nan)
        auc = self._counts.auc()
        loss, rate = self._loss / self._samples, float(self._labelled.sum()) / self._samples
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) if 0 < rate < 1 else math.nan
        found = {
            "auc": auc.value,
            "log_loss": loss,
            "normalized_entropy": loss / entropy,
            "calibration": _ratio(self._predicted.sum(), self._labelled.sum()),
        }
        if auc.error > 0:
            found["auc_error"] = auc.error
        for number, (predicted, labelled) in enumerate(zip(self._predicted, self._labelled, strict=True)):
            if predicted > 0 and labelled > 0:
                found[f"calibration[{number / _BUCKETS:g},{(number + 1) / _BUCKETS:g})"] = _ratio(predicted, labelled)
        return found


@dataclass
class ErrorMetrics:
    """The metrics of numbers: ``mse``, the mean squared error, and ``mae``, the mean absolute error."""

    samples: float = 0.0
    squares: float = 0.0
    absolutes: float = 0.0

    def add(
        self,
        outputs: npt.NDArray[np.float32],
        labels: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Adds samples: their outputs (n), labels (n) and weights (n), None: 1."""
        errors, w = outputs.astype(np.float64) - labels, _weights(weights, len(outputs))
        self.samples += float(w.sum())
        self.squares += float((w * np.square(errors)).sum())
        self.absolutes += float((w * np.abs(errors)).sum())

    @staticmethod
    def merged(parts: Sequence[ErrorMetrics]) -> ErrorMetrics:
        """Returns the metrics of several together."""
        return ErrorMetrics(
            sum(part.samples for part in parts),
            sum(part.squares for part in parts),
            sum(part.absolutes for part in parts),
        )

    def results(self) -> dict[str, float]:
        """Returns the metrics by name."""
        return {"mse": _ratio(self.squares, self.samples), "mae": _ratio(self.absolutes, self.samples)}


@dataclass
class RankMetrics:
    """The metrics of candidates by the rank r of the positive among them, from 1; a tie counts against it.

    Every metric but the loss is NaN when a score of a sample that is ranked was NaN.

    ``loss``; ``mrr``, the mean of 1 / r; and for each k ``hit_rate@k``, the share with r <= k, which with one positive
    is ``recall@k``; and ``ndcg@k``, the mean of 1 / log2(r + 1) where r <= k (Järvelin & Kekäläinen 2002).
    """

    at: tuple[int, ...] = (10,)
    samples: float = 0.0
    ranked: float = 0.0  # of these samples, those that are ranked
    loss: float = 0.0
    reciprocals: float = 0.0
    hits: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    gains: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not len(self.hits):
            self.hits, self.gains = np.zeros(len(self.at)), np.zeros(len(self.at))

    def add(
        self,
        scores: npt.NDArray[np.float32],
        positives: npt.NDArray[np.int64],
        loss: float,
        weights: npt.NDArray[np.float32] | None = None,
        is_ranked: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Adds samples.

        Args:
            scores: the scores of the candidates, (n, C).
            positives: the number of each sample's positive, (n).
            loss: the sum of the samples' losses, times their weights.
            weights: the weights, (n), at least 0; None: 1.
            is_ranked: whether a sample has a positive, (n), so that its rank counts; None: all have one.
        """
        w = _weights(weights, len(scores))
        self.samples += float(w.sum())
        self.loss += loss
        if is_ranked is not None:
            scores, positives, w = scores[is_ranked], positives[is_ranked], w[is_ranked]
        own = np.take_along_axis(scores, positives[:, None], axis=1)
        ranks = (scores >= own).sum(axis=1).astype(np.float64)
        self.ranked += float(w.sum())
        if np.isnan(scores).any():
            self.reciprocals += math.nan
            self.hits, self.gains = self.hits + math.nan, self.gains + math.nan
            return
        self.reciprocals += float((w / ranks).sum())
        for index, k in enumerate(self.at):
            is_hit = ranks <= k
            self.hits[index] += w[is_hit].sum()
            self.gains[index] += (w[is_hit] / np.log2(ranks[is_hit] + 1)).sum()

    @staticmethod
    def merged(parts: Sequence[RankMetrics]) -> RankMetrics:
        """Returns the metrics of several together; they have the same ``at``."""
        return RankMetrics(
            parts[0].at,
            sum(part.samples for part in parts),
            sum(part.ranked for part in parts),
            sum(part.loss for part in parts),
            sum(part.reciprocals for part in parts),
            np.sum([part.hits for part in parts], axis=0),
            np.sum([part.gains for part in parts], axis=0),
        )

    def results(self) -> dict[str, float]:
        """Returns the metrics by name."""
        found = {"loss": _ratio(self.loss, self.samples), "mrr": _ratio(self.reciprocals, self.ranked)}
        for k, hits, gains in zip(self.at, self.hits, self.gains, strict=True):
            found[f"hit_rate@{k}"], found[f"ndcg@{k}"] = _ratio(hits, self.ranked), _ratio(gains, self.ranked)
        return found


def _weights(weights: npt.NDArray[np.float32] | None, samples: int) -> npt.NDArray[np.float64]:
    return np.ones(samples) if weights is None else weights.astype(np.float64)


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else math.nan
