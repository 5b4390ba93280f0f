"""MMoE against its equations, for any batch, and as a published program of several outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_features import CLICKS, array, assert_close, assert_model, click_inputs, click_tensors, perceptron, softmax
from sparserow.worker.models import MMoE


def build(**options):
    torch.manual_seed(1)
    return MMoE(tasks=["click", "buy"], experts=3, expert=[6, 5], tower=[4], **CLICKS, **options)


def test_mmoe_is_its_equations():
    model, tensors = build(), click_tensors(9)
    x = click_inputs(model.embeddings.tables, tensors)
    experts = [np.maximum(perceptron(expert, x), 0) for expert in model.experts]
    out = model(**tensors)
    assert list(out) == ["click", "buy"]
    for index, logits in enumerate(out.values()):
        gates = softmax(x @ array(model.gates[index].weight).T)
        mixed = sum(gates[:, i, None] * experts[i] for i in range(3))
        assert_close(logits, perceptron(model.towers[index], mixed)[:, 0])


def test_it_takes_any_batch_and_is_exported():
    assert_model(build(), click_tensors)


def test_a_task_trains_its_own_tower_and_gate_and_all_experts():
    model = build()
    model(**click_tensors(20))["buy"].sum().backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert any(name.startswith("towers.1") for name in touched)
    assert "gates.1.weight" in touched
    assert not any(name.startswith(("towers.0", "gates.0")) for name in touched)
    assert all(f"experts.{i}.0.weight" in touched for i in range(3))


@pytest.mark.parametrize("tasks", [[], ["click", "click"], "click"])
def test_tasks_have_names_of_their_own(tasks):
    with pytest.raises(ValueError, match=r"tasks=.* is not allowed; allowed: a list of names, each of them once"):
        MMoE({"user": 5}, tasks)
    with pytest.raises(ValueError, match="allowed: at least one expert with one layer"):
        MMoE({"user": 5}, ["click"], experts=0)
