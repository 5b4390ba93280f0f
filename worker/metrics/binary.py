"""Computes exact metrics of binary classification over whole test sets, in numpy and float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def auc(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Computes the area under the ROC curve: P(score of a positive > score of a negative) + P(equal scores) / 2.

    The method is that of ranks (Mann & Whitney 1947), in which tied scores have their mean rank. It is exact and takes
    O(n log n).

    Args:
        scores: the scores, (n); only their order matters, so logits or probabilities may be given.
        labels: the labels, 0 or 1, (n).

    Returns:
        A number in [0, 1]; NaN when one of the classes is absent or a score is NaN.
    """
    score = np.asarray(scores, dtype=np.float64)
    positive = np.asarray(labels) > 0.5
    positives = int(positive.sum())
    negatives = len(score) - positives
    if positives == 0 or negatives == 0 or np.isnan(score).any():
        return float("nan")
    order = np.argsort(score, kind="stable")
    ordered = score[order]
    group = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
    last_rank = np.cumsum(np.bincount(group))
    mean_rank = last_rank - (np.bincount(group) - 1) / 2.0
    rank_sum = float(mean_rank[group][positive[order]].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (float(positives) * negatives)


def log_loss(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Computes the mean negative log-likelihood in nats, from logits, so that no probability is clipped.

    The formula for a logit x and a label y is ``max(x, 0) - x y + log(1 + exp(-|x|))``.

    Args:
        logits: the logits, (n).
        labels: the labels, 0 or 1, (n).

    Returns:
        The mean; NaN when n is 0.
    """
    x = np.asarray(logits, dtype=np.float64)
    y = np.asarray(labels, dtype=np.float64)
    if len(x) == 0:
        return float("nan")
    return float((np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))).mean())
