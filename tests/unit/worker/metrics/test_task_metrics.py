"""Metrics over many samples: exact where they say so, within their bound elsewhere, and the same however cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from sparserow.proto.config.metrics_config import MetricsConfig
from sparserow.proto.config.tasks_config import Task
from sparserow.worker.data.batch import Batch
from sparserow.worker.metrics.binary import auc, log_loss
from sparserow.worker.metrics.grouped import GroupedScores, GroupSums
from sparserow.worker.metrics.losses import in_batch_softmax
from sparserow.worker.metrics.score_counts import ScoreCounts
from sparserow.worker.metrics.task_metrics import BinaryMetrics, ErrorMetrics, RankMetrics
from sparserow.worker.training.evaluation import _Scores
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.task_outputs import TaskOutputs


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


def test_samples_without_a_positive_are_not_ranked() -> None:
    metrics = RankMetrics((1,))
    scores = np.array([[5, 0, 0], [0, 5, 0], [9, 9, 0]], np.float32)
    weights = np.array([1, 2, 4], np.float32)
    metrics.add(scores, np.arange(3), 14.0, weights, np.array([True, True, False]))
    found = RankMetrics.merged([metrics, RankMetrics((1,))]).results()
    assert found == {"loss": 2.0, "mrr": 1.0, "hit_rate@1": 1.0, "ndcg@1": 1.0}


def test_scores_that_are_not_numbers_make_no_metric_better() -> None:
    ranks, whole = RankMetrics((1, 10)), RankMetrics((1, 10))
    ranks.add(np.array([[np.nan, 1.0], [2.0, np.nan]], np.float32), np.zeros(2, np.int64), math.nan)
    whole.add(np.array([[1.0, 0.0]], np.float32), np.zeros(1, np.int64), 0.0)
    assert all(math.isnan(value) for value in RankMetrics.merged([whole, ranks]).results().values())
    binary = BinaryMetrics()
    binary.add(np.array([0.3, -0.2], np.float32), np.array([1.0, 0.0], np.float32))
    binary.add(np.array([np.nan], np.float32), np.array([1.0], np.float32))
    found = binary.results()
    assert found.keys() == {"auc", "log_loss", "normalized_entropy", "calibration"}
    assert all(math.isnan(value) for value in found.values())
    grouped = GroupedScores()
    scores, labels = np.array([1.0, 0.0, np.nan, 0.0], np.float32), np.array([1.0, 0.0, 1.0, 0.0], np.float32)
    grouped.add(np.array([3, 3, 4, 4]), scores, labels)
    assert math.isnan(GroupedScores().sums([grouped]).gauc)


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


def test_a_matrix_of_scores_ranks_the_rewarded_samples_among_all_items() -> None:
    task = Task(name="click", label="click", loss="in_batch_softmax")
    scores = torch.zeros(4, 4)
    scores.diagonal().copy_(torch.tensor([5.0, 5.0, -5.0, -5.0]))  # two samples without a click have low scores
    scores[1, 3] = 7.0  # an item without a reward is a candidate all the same
    batch = Batch(torch.zeros(4, 0), torch.arange(4)[:, None], torch.tensor([1.0, 3.0, 0.0, 0.0]))
    found = _Scores(TaskOutputs([task]), MetricsConfig(at=(1,)))
    found.add({"click": scores}, batch)
    metrics = found.evaluation(WorkerGroup()).metrics
    assert (metrics["click.hit_rate@1"], metrics["click.mrr"]) == (0.5, 0.75)
    assert metrics["click.loss"] == pytest.approx(in_batch_softmax(scores, batch.label(task.label)).item())
