"""Losses against their formulas in float64, over micro-batches, for empty batches, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparserow.worker.metrics.losses import (
    LOSSES,
    check_labels,
    in_batch_softmax,
    undo_downsampling,
    undo_downsampling_of_logits,
)

B = 12


def case(name, samples=B):
    """Logits and labels of a loss."""
    generator = torch.Generator().manual_seed(3)
    columns = {"bce": (), "mse": (), "softmax": (5,), "bpr": (5,), "in_batch_softmax": (samples,)}[name]
    logits = torch.randn(samples, *columns, generator=generator) * 3
    if name in ("softmax", "bpr"):
        return logits, torch.randint(0, 5, (samples,), generator=generator)
    return logits, torch.rand(samples, generator=generator)


def by_definition(name, x, y, logq=0.0):
    """The loss of a sample, as its source writes it."""
    if name == "bce":
        p = 1 / (1 + np.exp(-x))
        return -(y * np.log(p) + (1 - y) * np.log(1 - p))
    if name == "mse":
        return (x - y) ** 2
    if name == "bpr":
        return -np.mean([np.log(1 / (1 + np.exp(-(x[y] - x[j])))) for j in range(len(x)) if j != y])
    return -np.log(np.exp(x[y] - np.broadcast_to(logq, x.shape)[y]) / np.exp(x - logq).sum())


def expected(name, logits, labels, logq=0.0):
    x, y = logits.double().numpy(), labels.numpy()
    if name == "in_batch_softmax":
        return np.array([y[i] * by_definition(name, x[i], i, logq) for i in range(len(x))])
    return np.array([by_definition(name, x[i], y[i]) for i in range(len(x))])


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula(name):
    logits, labels = case(name)
    each = expected(name, logits, labels)
    assert float(LOSSES[name](logits, labels, None)) == pytest.approx(each.mean(), rel=1e-5)
    weights = torch.rand(B, generator=torch.Generator().manual_seed(4)) * 3
    weighted = (weights.double().numpy() * each).sum() / B  # over B, not over the sum of weights
    assert float(LOSSES[name](logits, labels, weights)) == pytest.approx(weighted, rel=1e-5)
    assert LOSSES[name](logits.half(), labels, None).dtype == torch.float32
    assert float(LOSSES[name](logits, labels.float(), None)) == pytest.approx(each.mean(), rel=1e-5)


def test_in_batch_softmax_subtracts_the_logarithm_of_the_sampling_probability():
    logits, labels = case("in_batch_softmax")
    logq = torch.log(torch.rand(B, generator=torch.Generator().manual_seed(5)) + 0.01)
    wanted = expected("in_batch_softmax", logits, labels, logq.double().numpy()).mean()
    assert float(in_batch_softmax(logits, labels, logq=logq)) == pytest.approx(wanted, rel=1e-5)


def test_samples_of_the_same_item_are_no_negatives_of_each_other():
    logits, labels = case("in_batch_softmax")
    items = torch.tensor([2**62, 2, 3, 2, 5, 2**62, 2, 8, 9, 10, 11, 12])
    logits.requires_grad_()
    loss = in_batch_softmax(logits, labels, items=items)
    x, y = logits.detach().double().numpy(), labels.numpy()
    each = []
    for i in range(B):
        others = [j for j in range(B) if j == i or items[j] != items[i]]
        each.append(-y[i] * np.log(np.exp(x[i, i]) / np.exp(x[i, others]).sum()))
    assert loss.item() == pytest.approx(np.mean(each), rel=1e-5)
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[1, 3] == 0
    same = in_batch_softmax(logits, labels, items=torch.full((B,), 7))
    assert same.item() == pytest.approx(0, abs=1e-6)  # no sample has a negative


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "in_batch_softmax"])
def test_micro_batches_of_equal_size_have_the_gradient_of_the_whole_step(name):
    logits, labels = case(name)
    weights = torch.rand(B, generator=torch.Generator().manual_seed(4))
    whole = logits.clone().requires_grad_()
    LOSSES[name](whole, labels, weights).backward()
    parts = logits.clone().requires_grad_()
    for begin in range(0, B, 4):
        part = slice(begin, begin + 4)
        (LOSSES[name](parts[part], labels[part], weights[part]) * 4 / B).backward()
    torch.testing.assert_close(parts.grad, whole.grad)


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_batch_has_the_loss_0_and_gradients_of_0(name):
    logits, labels = case(name, samples=0)
    layer = torch.nn.Linear(1, 1)
    loss = LOSSES[name](logits + layer(torch.zeros(1, 1)).sum(), labels, torch.zeros(0))
    assert loss.item() == 0.0
    loss.backward()
    assert float(layer.weight.grad) == 0.0


@pytest.mark.parametrize("name", LOSSES)
def test_large_logits_stay_finite(name):
    logits, labels = case(name)
    large = (logits * 1e4).requires_grad_()
    loss = LOSSES[name](large, labels, None)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(large.grad).all()


def test_shapes_that_torch_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"bce: logits of shape \(3, 1\) and labels of shape \(3,\) are not allowed"):
        LOSSES["bce"](torch.zeros(3, 1), torch.zeros(3), None)
    with pytest.raises(ValueError, match=r"labels of shape \(1,\) are not allowed; allowed: logits \(B\) and labels"):
        LOSSES["mse"](torch.zeros(3), torch.zeros(1), None)
    with pytest.raises(ValueError, match=r"weights of shape \(1,\) are not allowed; allowed: \(3,\)"):
        LOSSES["mse"](torch.zeros(3), torch.zeros(3), torch.ones(1))
    with pytest.raises(ValueError, match=r"logits of shape \(2, 3\) are not allowed; allowed: \(B, B\)"):
        in_batch_softmax(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"logq has shape \(1,\); allowed: \(2,\)"):
        in_batch_softmax(torch.zeros(2, 2), torch.zeros(2), logq=torch.zeros(1))
    with pytest.raises(ValueError, match=r"items has shape \(3,\); allowed: \(2,\)"):
        in_batch_softmax(torch.zeros(2, 2), torch.zeros(2), items=torch.zeros(3))
    with pytest.raises(ValueError, match="have no negative; allowed: 2 candidates or more"):
        LOSSES["bpr"](torch.zeros(2, 1), torch.zeros(2), None)


@pytest.mark.parametrize(
    ("name", "good", "bad", "allowed"),
    [
        ("bce", [0.0, 0.5, 1.0], [1.5, -0.1, float("nan")], "0 to 1"),
        ("mse", [-1e30, 7.0], [float("nan"), float("inf")], "finite numbers"),
        ("in_batch_softmax", [0.0, 30.0], [-1.0, float("inf"), float("nan")], "finite numbers >= 0"),
        ("softmax", [0.0, 4.0], [5.0, -1.0, 0.5, float("nan")], "an integer >= 0 and < 5"),
        ("bpr", [0.0, 4.0], [5.0, -1.0, 0.5, float("nan")], "an integer >= 0 and < 5"),
    ],
)
def test_labels_are_checked(name, good, bad, allowed):
    check_labels(name, torch.tensor(good), candidates=5)
    check_labels(name, torch.zeros(0), candidates=5)
    for label in bad:
        with pytest.raises(ValueError, match=f"of sample 1 is not allowed by {name}; allowed: .*{allowed}$"):
            check_labels(name, torch.tensor([0.0, label]), candidates=5)
    with pytest.raises(ValueError, match="loss='hinge' is not allowed; allowed: bce, mse, softmax, bpr"):
        check_labels("hinge", torch.zeros(1))


def test_integer_labels_are_checked_too():
    check_labels("softmax", torch.tensor([0, 10**9]))
    with pytest.raises(ValueError, match="-3 of sample 0"):
        check_labels("softmax", torch.tensor([-3]))


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.01])
def test_both_forms_undo_the_sampling_of_negatives(rate):
    p = torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    corrected = undo_downsampling(p, rate)
    torch.testing.assert_close(corrected, torch.sigmoid(undo_downsampling_of_logits(torch.logit(p), rate)))
    sampled = corrected / (corrected + (1 - corrected) * rate)  # the share of positives once negatives are dropped
    torch.testing.assert_close(sampled, p)
    with pytest.raises(ValueError, match="rate=0 is not allowed; allowed: > 0 and <= 1"):
        undo_downsampling(p, 0)
    with pytest.raises(ValueError, match=r"rate=1\.5 is not allowed"):
        undo_downsampling_of_logits(p, 1.5)
