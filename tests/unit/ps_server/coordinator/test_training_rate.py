"""Rates and losses between heartbeats, and figures that no worker can measure."""

from __future__ import annotations

import math

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.ps_server.coordinator.state.training_rate import TrainingRate


def figures(samples: int, loss_sum: float, measured: int | None = None, **more: float | str) -> pb.TrainingFigures:
    return pb.TrainingFigures(
        samples=samples, measured=samples if measured is None else measured, loss_sum=loss_sum, **more
    )


def test_figures_are_of_the_time_between_two_heartbeats() -> None:
    rate = TrainingRate()
    rate.note(figures(100, 60.0), 10.0)
    assert (rate.samples_per_sec, rate.loss) == (None, None)
    rate.note(figures(300, 160.0), 14.0)
    assert (rate.samples_per_sec, rate.loss) == (50, pytest.approx(0.5))
    rate.note(figures(310, 162.0), 14.1)
    assert (rate.samples_per_sec, rate.loss) == (50, pytest.approx(0.5)), "a heartbeat that was sent again at once"
    rate.note(figures(400, 180.0), 18.0)
    assert (rate.samples_per_sec, rate.loss) == (25, pytest.approx(0.2))
    rate.note(figures(400, 180.0), 22.0)
    assert (rate.samples_per_sec, rate.loss) == (0, None), "it stands still"


def test_a_loop_of_ones_own_reports_none() -> None:
    rate = TrainingRate()
    for now in (1.0, 4.0, 7.0):
        rate.note(pb.TrainingFigures(), now)
    assert (rate.samples_per_sec, rate.loss) == (None, None)


def test_losses_that_are_no_numbers_do_not_hide_those_after_them() -> None:
    rate = TrainingRate()
    rate.note(figures(100, 50.0), 0.0)
    rate.note(figures(200, 50.0, measured=100), 1.0)
    assert (rate.samples_per_sec, rate.loss) == (100, None)
    rate.note(figures(300, 90.0, measured=200), 2.0)
    assert (rate.samples_per_sec, rate.loss) == (100, pytest.approx(0.4))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_no_worker_can_measure_are_left_out(bad: float) -> None:
    rate = TrainingRate()
    rate.note(figures(100, bad, auc=bad, test_metric="auc", test_value=bad), 0.0)
    rate.note(figures(200, bad, auc=bad, test_metric="auc", test_value=bad), 1.0)
    assert (rate.samples_per_sec, rate.loss) == (100, None)
    assert rate.figures == pb.TrainingFigures(samples=200)
    rate.note(figures(200, 1.7e308), 2.0)
    rate.note(figures(300, -1.7e308), 3.0)
    assert rate.loss is None
    rate.note(figures(50, 10.0), 4.0)
    assert (rate.samples_per_sec, rate.loss) == (0, None), "a count that fell"
