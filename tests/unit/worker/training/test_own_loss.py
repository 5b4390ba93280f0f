"""A function of one's own as a loss: it is weighed as others are, and one that does not fit is refused by its key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.config.tasks_config import NegativesConfig, Task
from sparserow.proto.options.document import load_config
from sparserow.worker.data import NamedPart
from sparserow.worker.metrics.losses import LOSSES
from sparserow.worker.training.own_loss import OwnLoss
from sparserow.worker.training.task_outputs import TaskOutputs

BASE = ["data.train=a", "data.test=b", "model={class: DLRM, args: {rows: {'*': 1000000}}}"]
CSV = ["data.format=csv", "features={b: {kind: id}}", "data.csv={label: a, group: g}"]


def drawn(name: str, seed: int, samples: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, labels and weights that a loss of this package takes."""
    random = torch.Generator().manual_seed(seed)
    shape = (samples, 5) if name == "softmax" else (samples,)
    labels = torch.randint(0, {"softmax": 5}.get(name, 2), (samples,), generator=random).float()
    return torch.randn(shape, generator=random) * 3, labels, torch.rand(samples, generator=random)


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("name", ["bce", "mse", "softmax"])
def test_a_function_that_equals_a_loss_has_its_bits(name: str, has_weights: bool) -> None:
    own = OwnLoss(Task("click", "click", f"own_losses:{name}", metrics=name))  # type: ignore[arg-type]
    for seed in range(20):
        scores, labels, drawn_weights = drawn(name, seed)
        weights = drawn_weights if has_weights else None
        found, wanted = (scores.clone().requires_grad_() for _ in range(2))
        mine, built_in = own(found, labels, weights), LOSSES[name](wanted, labels, weights)
        mine.backward()
        built_in.backward()
        assert torch.equal(mine, built_in)
        assert found.grad is not None
        assert wanted.grad is not None
        assert torch.equal(found.grad, wanted.grad)


def test_the_gradient_does_not_depend_on_how_samples_are_cut() -> None:
    outputs = TaskOutputs([Task("click", "click", "own_losses:focal", metrics="bce")])
    scores, labels, weights = drawn("bce", 3, samples=30)
    whole = scores.clone().requires_grad_()
    outputs.loss({"click": whole}, NamedPart({}, labels, weights=weights)).backward()
    cut = scores.clone().requires_grad_()
    for begin, end in ((0, 7), (7, 8), (8, 30)):
        part = NamedPart({}, labels[begin:end], weights=weights[begin:end])
        (outputs.loss({"click": cut[begin:end]}, part) * len(part) / 30).backward()
    torch.testing.assert_close(cut.grad, whole.grad)


def test_without_samples_a_function_is_not_called() -> None:
    own = OwnLoss(Task("click", "click", "own_losses:fails", metrics="bce"))
    scores = torch.zeros(0, requires_grad=True)
    loss = own(scores, torch.zeros(0))
    loss.backward()
    assert float(loss.detach()) == 0.0


@pytest.mark.parametrize("name", ["focal", "sharp_focal", "of_torch"])
def test_what_is_called_by_scores_and_labels_is_a_loss(name: str) -> None:
    OwnLoss(Task("click", "click", f"own_losses:{name}", metrics="bce")).check()


def test_drawn_candidates_are_those_of_the_function() -> None:
    negatives = NegativesConfig(kind="uniform", per_positive=4)
    task = Task("next", "next", "own_losses:softmax", item="item", negatives=negatives, metrics="softmax")
    OwnLoss(task).check()
    scores, _, rewards = drawn("softmax", 5)
    part = NamedPart({}, rewards)
    wanted = TaskOutputs([Task("next", "next", "softmax", item="item", negatives=negatives)])
    assert torch.equal(TaskOutputs([task]).loss({"next": scores}, part), wanted.loss({"next": scores}, part))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("own_lsses:focal", "module own_lsses cannot be imported: ModuleNotFoundError"),
        ("own_losses:focl", "own_losses has no function focl; nearest: focal"),
        ("own_losses:number", "own_losses has no function number"),
        ("own_losses:Focal", "own_losses has no function Focal"),
        ("own_losses:learnt", "own_losses:learnt has parameters, which no optimizer trains; allowed: a loss without"),
        (
            "own_losses:weighted",
            r"takes \(scores.*weights: 'Tensor'\).*; allowed: a function of \(scores, labels\), as",
        ),
        ("own_losses:mean", r"own_losses:mean returned \(\) float32 on cpu for 4 samples; allowed: a loss for each"),
        ("own_losses:column", r"returned \(4, 1\) float32 on cpu for 4 samples"),
        ("own_losses:double", r"returned \(4,\) float64 on cpu for 4 samples; allowed: .*\(B\) float32"),
        ("own_losses:counted", r"returned \(4,\) int64 on cpu for 4 samples"),
        ("own_losses:cut_off", "returned losses without a gradient; allowed: .*, with a gradient"),
        ("own_losses:apart", "returned losses whose gradient does not reach the scores"),
        ("own_losses:of_numpy", "returned ndarray; allowed: "),
        ("own_losses:in_place", "own_losses:in_place changed its scores or labels in place; allowed: new tensors"),
        ("own_losses:fails", "own_losses:fails raised ValueError: no such margin, in .*own_losses.py, line .*, fails"),
        ("own_losses:fails_backward", "raised in its backward ValueError: no such gradient, in .*own_losses.py, line"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_by_its_key(loss: str, message: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=rf"^tasks\.click\.loss: .*{message}"):
        OwnLoss(Task("click", "click", loss, metrics="bce")).check()


@pytest.mark.parametrize(
    ("metrics", "out", "message"),
    [
        ("bce", torch.zeros(3, 1), r"forward returned \(3, 1\) for 3 samples; allowed with metrics bce: \(B\)"),
        ("softmax", torch.zeros(3), r"forward returned \(3,\) for 3 samples; allowed with metrics softmax: \(B, C\)"),
    ],
)
def test_outputs_are_those_of_the_metrics(metrics: Any, out: torch.Tensor, message: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=rf"tasks\.click: {message}"):
        TaskOutputs([Task("click", "click", f"own_losses:{metrics}", metrics=metrics)]).of(out, 3)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["tasks={a: {loss: 'own_losses:bce'}}"], "tasks.a.loss: own_losses:bce needs tasks.a.metrics, as a function"),
        (["tasks={a: {metrics: bce}}"], "tasks.a.metrics: has no effect with loss bce, which has its own; remove it"),
        (["tasks={a: {loss: bcd}}"], "tasks.a.loss: .*bce, mse, softmax, bpr, in_batch_softmax, or MODULE:FUNCTION"),
        (["tasks={a: {loss: 'own losses:bce', metrics: bce}}"], "tasks.a.loss: .*or MODULE:FUNCTION"),
        (["tasks={a: {loss: 'm:f', metrics: bpr}}"], "tasks.a.metrics: 'bpr' is not allowed; allowed: .*softmax"),
        (["tasks={a: {loss: 'm:f', metrics: bce, item: b}}"], "tasks.a.item: has no effect with loss m:f without"),
        (
            ["tasks={a: {loss: 'm:f', metrics: mse, item: b, negatives: {kind: uniform, per_positive: 2}}}"],
            "tasks.a.negatives: is not possible with metrics mse; allowed: softmax, bpr, or a loss of one's own with",
        ),
        (
            ["tasks={a: {loss: 'm:f', metrics: bce}}", "data.negatives_keep=0.5"],
            "data.negatives_keep: needs a single task with loss bce, as the logits of others cannot be corrected",
        ),
        (["tasks={a: {loss: 'm:f', metrics: mse}}", *CSV], "group: needs a task with loss bce or metrics bce"),
        (["tasks={a: {loss: 'm:f', metrics: mse}}", "metrics.at=[5]"], "metrics.at: needs a task over candidates"),
        (
            ["tasks={a: {loss: 'm:f', metrics: mse}}", "metrics={progressive: {}, file: m}"],
            "metrics.progressive: needs a task with loss bce or metrics bce",
        ),
        (
            ["tasks={a: {loss: 'm:f', metrics: mse}}", "metrics.stop={metric: a.auc}"],
            "metrics.stop.metric: 'a.auc' is not allowed; allowed: a.mse, a.mae",
        ),
    ],
)
def test_what_does_not_fit_a_function_is_refused(sets: list[str], message: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        load_config(JobConfig, None, [*BASE, *sets])


@pytest.mark.parametrize(
    "sets",
    [
        ["tasks={a: {loss: 'm:f', metrics: bce}}", *CSV, "metrics={progressive: {}, file: m, stop: {metric: a.gauc}}"],
        ["tasks={a: {loss: 'm.n:f', metrics: softmax}}", "metrics={at: [5], stop: {metric: a.ndcg@5}}"],
        ["tasks={a: {loss: 'm:f', metrics: mse}}", "metrics.stop={metric: a.mae}", "train.dense=ddp"],
    ],
)
def test_the_metrics_of_a_function_stand_for_those_of_a_loss(sets: list[str]) -> None:
    load_config(JobConfig, None, [*BASE, *sets])
