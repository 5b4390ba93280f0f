"""AUC and log-loss against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparserow.worker.metrics.binary import auc, log_loss


def auc_by_definition(scores, labels) -> float:
    positive = [s for s, y in zip(scores, labels, strict=True) if y]
    negative = [s for s, y in zip(scores, labels, strict=True) if not y]
    won = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    return won / (len(positive) * len(negative))


@pytest.mark.parametrize("distinct", [1, 2, 5, 50, 10**6])
@pytest.mark.parametrize("seed", range(4))
def test_auc_equals_its_definition(distinct, seed):
    random = np.random.default_rng(seed)
    scores = random.integers(0, distinct, 120).astype(np.float32) / 7
    labels = random.random(120) < 0.3
    assert auc(scores, labels) == pytest.approx(auc_by_definition(scores, labels), abs=1e-12)


def test_auc_ends():
    assert auc([0.1, 0.2, 0.3], [0, 0, 1]) == 1.0
    assert auc([0.3, 0.2, 0.1], [0, 0, 1]) == 0.0
    assert auc([1, 1, 1, 1], [0, 1, 0, 1]) == 0.5
    assert math.isnan(auc([1, 2], [1, 1]))
    assert math.isnan(auc([1, 2], [0, 0]))
    assert math.isnan(auc([], []))
    assert math.isnan(auc([1, float("nan")], [0, 1]))
    assert auc([-np.inf, 0, np.inf], [0, 1, 1]) == 1.0


def test_log_loss_equals_its_definition():
    random = np.random.default_rng(0)
    x, y = random.normal(0, 3, 500), random.random(500) < 0.4
    p = 1 / (1 + np.exp(-x))
    assert log_loss(x, y) == pytest.approx(float(-np.where(y, np.log(p), np.log(1 - p)).mean()), rel=1e-12)
    assert log_loss([1e4, -1e4], [0, 0]) == pytest.approx(5e3)  # finite where a probability would be 1
    assert math.isnan(log_loss([], []))
