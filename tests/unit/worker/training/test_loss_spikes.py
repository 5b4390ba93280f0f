"""When a loss counts as a jump."""

from __future__ import annotations

import pytest

from sparserow.proto.config.spike_config import SpikeConfig
from sparserow.proto.errors import InvalidArgument
from sparserow.worker.training.loss_spikes import LossSpikes
from sparserow.worker.training.process_group import WorkerGroup


def spikes(rank: int = 0, **options: float) -> LossSpikes:
    return LossSpikes(SpikeConfig.model_validate({"factor": 3, "window": 20, **options}), WorkerGroup(rank, 2))


def test_the_last_tenth_is_compared_with_the_rest_of_a_full_window() -> None:
    it = spikes()
    for _ in range(18):
        it.add(0.5)
        assert not it.is_due
    it.add(9.0)
    assert not it.is_due  # the window is not full
    it.add(9.0)
    assert it.is_due
    assert not LossSpikes(None, WorkerGroup()).is_due


def test_one_loud_step_within_a_calm_tenth_is_no_jump() -> None:
    it = spikes(window=100)
    for number in range(100):
        it.add(4.0 if number == 95 else 0.5)
    assert not it.is_due


def test_the_first_worker_alone_finds_it() -> None:
    it = spikes(rank=1)
    for number in range(20):
        it.add(0.5 if number < 18 else 9.0)
    assert not it.is_due


def test_after_it_went_back_the_calm_steps_stay_in_the_window() -> None:
    it = spikes(most=2)
    for number in range(21):
        it.add(0.5 if number < 18 else 9.0)
    assert it.is_due
    it.note()
    assert not it.is_due
    for _ in range(3):
        it.add(9.0)
    assert it.is_due
    it.note()
    with pytest.raises(InvalidArgument, match=r"train\.spike: the loss has jumped 3 times .*allowed: 2"):
        it.note()
