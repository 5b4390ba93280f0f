"""Schedules: closed forms, on dense weights and rows alike, and that a commit is applied with its own rate."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

import sparserow as sr
from sparserow.proto.config.schedule import ScheduleConfig
from sparserow.worker.training.learning_rates import LearningRates

STEPS = 12
FORMS: dict[str, tuple[dict[str, object], Callable[[int], float]]] = {
    "constant": ({"kind": "constant"}, lambda _: 1.0),
    "warmup": ({"kind": "constant", "warmup_steps": 4}, lambda t: min(1.0, (t + 1) / 4)),
    "warmup-1": ({"kind": "constant", "warmup_steps": 1}, lambda _: 1.0),
    "step": ({"kind": "step", "every_steps": 3, "factor": 0.5}, lambda t: 0.5 ** (t // 3)),
    "step-warmup": (
        {"kind": "step", "every_steps": 3, "factor": 0.5, "warmup_steps": 2},
        lambda t: 0.5 ** (t // 3) * min(1.0, (t + 1) / 2),
    ),
    "cosine": ({"kind": "cosine", "total_steps": 8}, lambda t: (1 + math.cos(math.pi * min(t, 8) / 8)) / 2),
    "cosine-warmup": (
        {"kind": "cosine", "total_steps": 8, "warmup_steps": 3},
        lambda t: (1 + math.cos(math.pi * min(t, 8) / 8)) / 2 * min(1.0, (t + 1) / 3),
    ),
    "linear": ({"kind": "linear", "total_steps": 8}, lambda t: max(0.0, 1 - t / 8)),
    "linear-final": (
        {"kind": "linear", "total_steps": 4, "final_factor": 0.2},
        lambda t: 1 - 0.8 * min(t, 4) / 4,
    ),
}


def schedule_of(section: dict[str, object]) -> ScheduleConfig:
    return TypeAdapter(ScheduleConfig).validate_python(section)


@pytest.mark.parametrize("name", FORMS)
def test_every_commit_is_applied_with_its_own_rate(name: str) -> None:
    """Gradients of 1: a step moves the weight and the row by the rate of that very step."""
    section, form = FORMS[name]
    with sr.InProcessCluster(shards=2).connect("rates") as session:
        model = nn.Sequential(nn.Embedding(10, 2))
        session.distribute(model, optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
        weight = nn.Parameter(torch.zeros(1))
        dense = torch.optim.SGD([weight], lr=0.25)
        rates = LearningRates(schedule_of(section), (dense, session.optimizer))
        for step in range(STEPS):
            row, before = session.table("0").pull([3]), weight.detach().clone()
            (model(torch.tensor([3])).sum() + weight.sum()).backward()
            assert session.step(dense)
            moved = row - session.table("0").pull([3])
            np.testing.assert_allclose(moved, np.full((1, 2), 0.5 * form(step)), atol=1e-6)
            torch.testing.assert_close(before - weight.detach(), torch.tensor([0.25 * form(step)]), rtol=0, atol=1e-6)
            rates.step()


def test_a_schedule_by_epochs_falls_under_a_warmup_and_goes_on_from_its_state() -> None:
    section = {"kind": "step", "every_epochs": 2, "factor": 0.1, "warmup_steps": 3}

    def made() -> tuple[torch.optim.Optimizer, LearningRates]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, LearningRates(schedule_of(section), (optimizer,))

    def rate_of(epoch: int, step: int) -> float:
        return 0.1 ** ((epoch - 1) // 2) * min(1.0, (step + 1) / 3)

    optimizer, rates = made()
    state: tuple[dict, dict] | None = None
    for step in range(10):
        epoch = 1 + step // 2
        rates.begin_epoch(epoch)
        rates.begin_epoch(epoch)  # as after a restart within the epoch
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate_of(epoch, step))
        optimizer.step()
        rates.step()
        if step == 5:
            state = copy.deepcopy((optimizer.state_dict(), rates.state_dict()))
    assert state is not None
    optimizer, rates = made()
    optimizer.load_state_dict(state[0])
    rates.load_state_dict(state[1])
    rates.take_given()
    for step in range(6, 10):
        rates.begin_epoch(1 + step // 2)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate_of(1 + step // 2, step))
        rates.step()


def test_a_worker_that_joins_in_a_later_epoch_has_the_rates_of_that_epoch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = LearningRates(schedule_of({"kind": "step", "every_epochs": 1, "factor": 0.5}), (optimizer,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates.begin_at(40)
        rates.begin_epoch(4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.125)


def test_a_rate_of_the_job_file_takes_the_place_of_the_checkpoints_at_the_same_share() -> None:
    section, form = FORMS["cosine-warmup"]

    def made(lr: float, **options: float) -> tuple[torch.optim.Optimizer, LearningRates]:
        optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=lr, **options)
        return optimizer, LearningRates(schedule_of(section), (optimizer,))

    before, rates = made(1.0)
    for _ in range(5):
        before.step()
        rates.step()
    for lr, decay in ((1.0, 0.0), (0.1, 0.0), (0.0, 0.5)):
        after, present = made(lr, weight_decay=decay)
        after.load_state_dict(before.state_dict())
        present.load_state_dict(rates.state_dict())
        present.take_given()
        group = after.param_groups[0]
        assert group["weight_decay"] == decay
        assert group["lr"] == pytest.approx(lr * form(5))
        if lr == 1.0:
            assert group["lr"] == before.param_groups[0]["lr"], "the same rates are the same bits"
        after.step()
        present.step()
        assert group["lr"] == pytest.approx(lr * form(6))


def test_rates_of_a_checkpoint_that_does_not_say_what_its_job_gave_stay() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = LearningRates(schedule_of({"kind": "constant"}), (optimizer,))
    state = rates.state_dict()
    del state["rates"]
    optimizer.param_groups[0]["lr"] = 0.25
    rates.load_state_dict(state)
    rates.take_given()
    assert optimizer.param_groups[0]["lr"] == 0.25


SCHEDULES = {
    "linear": {"kind": "linear", "total_steps": 1000},
    "cosine": {"kind": "cosine", "total_steps": 500},
    "step": {"kind": "step", "every_steps": 7, "factor": 0.9},
    "warmup": {"kind": "linear", "total_steps": 1000, "warmup_steps": 50},
    "constant": {"kind": "constant"},
}


@pytest.mark.parametrize("steps", [0, 3, 49, 400, 1500])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_worker_that_joins_goes_on_where_the_others_are(name: str, steps: int) -> None:
    schedule = TypeAdapter(ScheduleConfig).validate_python(SCHEDULES[name])

    def worker() -> tuple[torch.optim.Optimizer, LearningRates]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, LearningRates(schedule, [optimizer])

    (first, rates), (second, joined) = worker(), worker()
    for _ in range(steps):
        first.step()
        rates.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joined.begin_at(steps)
    assert joined.done == steps
    for _ in range(5):
        assert second.param_groups[0]["lr"] == pytest.approx(first.param_groups[0]["lr"])
        for optimizer, each in ((first, rates), (second, joined)):
            optimizer.step()
            each.step()
