"""Exact binary-classification metrics over whole test sets, in numpy and float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def auc(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Area under the ROC curve: P(score of a positive > of a negative) + half of P(equal).

    By ranks (Mann & Whitney 1947): sort once, give tied scores their mean rank. Exact, O(n log n).

    Args:
        scores: (n) any order-preserving score; a logit serves as well as a probability.
        labels: (n) 0 or 1.

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
    """Mean negative log-likelihood in nats, computed from logits so that no probability is clipped.

    ``max(x, 0) - x y + log(1 + exp(-|x|))``.

    Args:
        logits: (n).
        labels: (n) 0 or 1.

    Returns:
        NaN when n is 0.
    """
    x = np.asarray(logits, dtype=np.float64)
    y = np.asarray(labels, dtype=np.float64)
    if len(x) == 0:
        return float("nan")
    return float((np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))).mean())
