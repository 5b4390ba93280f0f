"""Metrics over many samples: exact where they say so, within their bound elsewhere, and the same however cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sparserow.worker.metrics.binary import auc, log_loss
from sparserow.worker.metrics.grouped import GroupedScores, GroupSums
from sparserow.worker.metrics.score_counts import ScoreCounts
from sparserow.worker.metrics.task_metrics import BinaryMetrics, ErrorMetrics, RankMetrics


def drawn(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    logits = draw.normal(-1, 1.5, count).astype(np.float32)
    return logits, (draw.random(count) < 1 / (1 + np.exp(-logits))).astype(np.float32)


def counted(logits: np.ndarray, labels: np.ndarray, cuts: int, most_bins: int = 1 << 21) -> ScoreCounts:
    parts = []
    for part in np.array_split(np.arange(len(logits)), cuts):
        counts = ScoreCounts(most_bins)
        for piece in np.array_split(part, 3):
            counts.add(logits[piece], labels[piece])
        parts.append(counts)
    return ScoreCounts.merged(parts)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-9, 9, width=32), st.integers(0, 1)), min_size=1, max_size=60),
    st.integers(1, 4),
)
def test_few_scores_give_the_exact_auc(samples: list[tuple[float, int]], cuts: int) -> None:
    logits = np.array([score for score, _ in samples], np.float32)
    labels = np.array([label for _, label in samples], np.float32)
    found = counted(logits, labels, cuts).auc()
    np.testing.assert_allclose(found.value, auc(logits, labels), atol=1e-12)
    assert found.error == 0


def test_zeros_of_both_signs_are_one_score() -> None:
    counts = ScoreCounts()
    counts.add(np.array([-0.0, 0.0], np.float32), np.array([1.0, 0.0], np.float32))
    assert counts.bins == 1
    assert counts.auc().value == 0.5


@pytest.mark.parametrize("most_bins", [64, 4096, 100_000])
def test_bins_that_do_not_suffice_are_within_the_bound(most_bins: int) -> None:
    logits, labels = drawn(300_000, 3)
    counts = counted(logits, labels, 5, most_bins)
    assert most_bins / 2 - 1 <= counts.bins <= most_bins
    found, exact = counts.auc(), auc(logits, labels)
    assert 0 < found.error < 1 / most_bins * 30
    assert abs(found.value - exact) <= found.error


def test_the_bound_is_a_millionth_on_scores_of_two_million() -> None:
    logits, labels = drawn(2_500_000, 4)
    found = counted(logits, labels, 2).auc()
    assert found.error <= 1e-6
    assert abs(found.value - auc(logits, labels)) <= max(found.error, 1e-12)


def test_a_score_that_is_no_number_gives_none() -> None:
    counts = ScoreCounts()
    counts.add(np.array([np.nan, 1.0], np.float32), np.array([1.0, 0.0], np.float32))
    assert math.isnan(counts.auc().value)


def test_binary_metrics_are_those_of_their_formulas() -> None:
    logits, labels = drawn(20_000, 5)
    parts = []
    for part in np.array_split(np.arange(len(logits)), 3):
        metrics = BinaryMetrics()
        metrics.add(logits[part], labels[part])
        parts.append(metrics)
    found = BinaryMetrics.merged(parts).results()
    p, rate = 1 / (1 + np.exp(-logits.astype(np.float64))), labels.mean(dtype=np.float64)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert found["auc"] == pytest.approx(auc(logits, labels), abs=1e-12)
    assert found["log_loss"] == pytest.approx(log_loss(logits, labels))
    assert found["normalized_entropy"] == pytest.approx(log_loss(logits, labels) / entropy)
    assert found["calibration"] == pytest.approx(p.sum() / labels.sum())
    mine = (p >= 0.3) & (p < 0.4)
    assert found["calibration[0.3,0.4)"] == pytest.approx(p[mine].sum() / labels[mine].sum())
    assert "auc_error" not in found
    assert all(math.isnan(value) for value in BinaryMetrics().results().values())


def test_metrics_of_numbers() -> None:
    first, second = ErrorMetrics(), ErrorMetrics()
    first.add(np.array([1.0, 2.0], np.float32), np.array([0.0, 4.0], np.float32))
    second.add(np.array([3.0], np.float32), np.array([3.0], np.float32))
    assert ErrorMetrics.merged([first, second]).results() == {"mse": 5 / 3, "mae": 1.0}


def test_metrics_of_candidates() -> None:
    scores = np.array([[3, 1, 2], [1, 1, 5], [0, 9, 8]], np.float32)
    metrics = RankMetrics((1, 2))
    metrics.add(scores[:2], np.array([0, 1]), 1.0)
    other = RankMetrics((1, 2))
    other.add(scores[2:], np.array([2]), 2.0)
    found = RankMetrics.merged([metrics, other]).results()
    assert found["loss"] == 1.0
    assert found["mrr"] == pytest.approx((1 + 1 / 3 + 1 / 2) / 3), "a tie counts against the positive"
    assert (found["hit_rate@1"], found["hit_rate@2"]) == pytest.approx((1 / 3, 2 / 3))
    assert found["ndcg@2"] == pytest.approx((1 + 1 / np.log2(3)) / 3)


@pytest.mark.parametrize("world", [1, 3])
def test_gauc_is_the_mean_of_the_groups_by_their_samples(world: int) -> None:
    draw = np.random.default_rng(8)
    groups = draw.integers(0, 40, 3_000) * 7919
    logits, labels = draw.integers(-5, 6, 3_000).astype(np.float32), draw.integers(0, 2, 3_000).astype(np.float32)
    labels[groups == 0] = 1  # a group of one class
    weighted = total = 0.0
    for group in np.unique(groups):
        mine = groups == group
        if 0 < labels[mine].sum() < mine.sum():
            weighted += mine.sum() * auc(logits[mine], labels[mine])
            total += mine.sum()
    held = []
    for part in np.array_split(np.arange(3_000), world):
        scores = GroupedScores()
        scores.add(groups[part], logits[part], labels[part])
        held.append(scores.by_rank(world))
    sums = [GroupedScores().sums([parts[rank] for parts in held]) for rank in range(world)]
    whole = GroupSums(
        sum(each.weighted for each in sums), sum(each.samples for each in sums), sum(each.groups for each in sums)
    )
    assert whole.gauc == pytest.approx(weighted / total)
    assert whole.groups == 40
    assert math.isnan(GroupSums().gauc)
