"""Weighted metrics against literal transcriptions in numpy, over samples that several ranks have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.metrics.grouped import GroupedScores
from sparserow.worker.metrics.score_counts import ScoreCounts
from sparserow.worker.metrics.task_metrics import BinaryMetrics, ErrorMetrics, RankMetrics

SEED, SAMPLES, RANKS = 12, 900, 3
Samples = tuple[np.ndarray, np.ndarray, np.ndarray]


def drawn(*, whole: bool = False) -> Samples:
    """Logits with ties, labels and weights, some of which are 0."""
    draw = np.random.default_rng(SEED)
    logits = np.round(draw.normal(-0.5, 1.5, SAMPLES), 1).astype(np.float32)
    labels = (draw.random(SAMPLES) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    weights = draw.integers(0, 4, SAMPLES) if whole else draw.exponential(1.0, SAMPLES) * (draw.random(SAMPLES) > 0.1)
    print(f"seed {SEED}")
    return logits, labels, weights.astype(np.float32)


def literal_auc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float:
    """The probability that a positive has a higher score, over all pairs."""
    is_positive = labels > 0.5
    pairs = weights[is_positive, None].astype(np.float64) * weights[None, ~is_positive]
    difference = scores[is_positive, None] - scores[None, ~is_positive]
    return float((pairs * ((difference > 0) + 0.5 * (difference == 0))).sum() / pairs.sum())


def parts_of_ranks() -> list[np.ndarray]:
    return np.array_split(np.arange(SAMPLES), RANKS)


def test_binary_metrics_are_those_of_their_formulas() -> None:
    logits, labels, weights = drawn()
    parts = []
    for part in parts_of_ranks():
        metrics = BinaryMetrics()
        for piece in np.array_split(part, 4):
            metrics.add(logits[piece], labels[piece], weights[piece])
        parts.append(metrics)
    found = BinaryMetrics.merged(parts).results()
    x, w = logits.astype(np.float64), weights.astype(np.float64)
    p = 1 / (1 + np.exp(-x))
    loss = -(w * (labels * np.log(p) + (1 - labels) * np.log(1 - p))).sum() / w.sum()
    rate = (w * labels).sum() / w.sum()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert found["auc"] == pytest.approx(literal_auc(logits, labels, weights), abs=1e-12)
    assert found["log_loss"] == pytest.approx(loss, rel=1e-12)
    assert found["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-12)
    assert found["calibration"] == pytest.approx((w * p).sum() / (w * labels).sum(), rel=1e-12)
    mine = (p >= 0.3) & (p < 0.4)
    assert found["calibration[0.3,0.4)"] == pytest.approx((w * p)[mine].sum() / (w * labels)[mine].sum(), rel=1e-12)
    unweighted = BinaryMetrics()
    unweighted.add(logits, labels)
    assert abs(unweighted.results()["auc"] - found["auc"]) > 1e-4, "weights make a difference"


def test_whole_weights_are_so_many_samples() -> None:
    logits, labels, weights = drawn(whole=True)
    many = np.repeat(np.arange(SAMPLES), weights.astype(np.int64))
    weighted, repeated = BinaryMetrics(), BinaryMetrics()
    weighted.add(logits, labels, weights)
    repeated.add(logits[many], labels[many])
    assert weighted.results() == pytest.approx(repeated.results(), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-4, 4), st.integers(0, 1), st.floats(0.25, 4, width=32)), min_size=2, max_size=40
    ).filter(lambda samples: {label for _, label, _ in samples} == {0, 1}),
    st.integers(4, 64),
)
def test_the_auc_is_within_its_bound(samples: list[tuple[int, int, float]], most_bins: int) -> None:
    scores, labels, weights = (np.array(each, np.float32) for each in zip(*samples, strict=True))
    counts = ScoreCounts(most_bins)
    counts.add(scores, labels, weights)
    found = counts.auc()
    assert abs(found.value - literal_auc(scores, labels, weights)) <= found.error + 1e-9


@pytest.mark.parametrize("world", [1, RANKS])
def test_gauc_weighs_samples_within_and_between_groups(world: int) -> None:
    logits, labels, weights = drawn()
    groups = np.random.default_rng(SEED + 1).integers(0, 30, SAMPLES) * 7919
    weights[groups == 7919] = 0  # a group that counts for nothing
    weighted = total = 0.0
    for group in np.unique(groups):
        mine = (groups == group) & (weights > 0)
        if 0 < labels[mine].sum() < mine.sum():
            size = float(weights[mine].sum(dtype=np.float64))
            weighted, total = weighted + size * literal_auc(logits[mine], labels[mine], weights[mine]), total + size
    there = []
    for part in np.array_split(np.arange(SAMPLES), world):
        scores = GroupedScores()
        scores.add(groups[part], logits[part], labels[part], weights[part])
        there.append(scores.by_rank(world))
    there.append(GroupedScores().by_rank(world))  # a rank without samples
    sums = [GroupedScores().sums([parts[rank] for parts in there]) for rank in range(world)]
    found = sum(each.weighted for each in sums) / sum(each.samples for each in sums)
    assert found == pytest.approx(weighted / total, rel=1e-9)
    assert sum(each.groups for each in sums) == 30


def test_metrics_of_numbers_and_of_candidates() -> None:
    draw = np.random.default_rng(SEED)
    outputs, labels, weights = (draw.normal(size=SAMPLES).astype(np.float32) for _ in range(3))
    weights = np.abs(weights)
    scores, positives = draw.normal(size=(SAMPLES, 7)).astype(np.float32), draw.integers(0, 7, SAMPLES)
    errors, ranks = [], []
    for part in parts_of_ranks():
        of_numbers, of_candidates = ErrorMetrics(), RankMetrics((1, 3))
        of_numbers.add(outputs[part], labels[part], weights[part])
        of_candidates.add(scores[part], positives[part], float(weights[part].sum()), weights[part])
        errors.append(of_numbers)
        ranks.append(of_candidates)
    w = weights.astype(np.float64)
    difference = outputs.astype(np.float64) - labels
    found = ErrorMetrics.merged(errors).results()
    assert found["mse"] == pytest.approx((w * difference**2).sum() / w.sum())
    assert found["mae"] == pytest.approx((w * np.abs(difference)).sum() / w.sum())
    place = 1 + (scores > scores[np.arange(SAMPLES), positives][:, None]).sum(axis=1)
    found = RankMetrics.merged(ranks).results()
    assert found["loss"] == pytest.approx(1.0)
    assert found["mrr"] == pytest.approx((w / place).sum() / w.sum())
    assert found["hit_rate@3"] == pytest.approx(w[place <= 3].sum() / w.sum())
    assert found["ndcg@3"] == pytest.approx((w / np.log2(place + 1))[place <= 3].sum() / w.sum())


def test_weights_without_their_column_are_refused() -> None:
    sets = [
        "data.train=a",
        "data.test=b",
        "model={class: DLRM, args: {rows: {'*': 1000000}}}",
        "data.format=parquet",
        "features={c: {kind: id}}",
    ]
    columns = "data.columns={label: y}"
    with pytest.raises(sr.errors.InvalidArgument, match=r"metrics\.weighted: needs a sample_weight of data"):
        load_config(JobConfig, None, [*sets, columns, "metrics.weighted=true"])
    assert not load_config(JobConfig, None, [*sets, "data.columns={label: y, sample_weight: w}"]).metrics.weighted
