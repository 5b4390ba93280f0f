"""What workers report of their training, as figures of their job."""

from __future__ import annotations

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.status.job_view import JobView, job_views


def member(rate: float | None = None, loss: float | None = None, **figures: float | str) -> pb.MemberStatus:
    return pb.MemberStatus(samples_per_sec=rate, loss=loss, figures=pb.TrainingFigures(**figures))


def view_of(*members: pb.MemberStatus, former: int | None = 10, seconds: float = 2.0) -> JobView:
    before = pb.GetStatusReply(jobs=[pb.JobStatus(job_id=1, highest_step=former)])
    job = pb.JobStatus(job_id=1, namespace="ads", name="ctr", world_size=2, highest_step=14, members=members)
    (view,) = job_views(before if seconds else None, pb.GetStatusReply(jobs=[job]), seconds)
    return view


def test_rates_are_summed_and_losses_weighted_by_them() -> None:
    view = view_of(member(300, 0.6), member(100, 0.2), member())
    assert (view.samples_per_sec, view.loss, view.steps_per_sec) == (400, pytest.approx(0.5), 2)


def test_a_single_look_has_them_too() -> None:
    view = view_of(member(300, 0.6), seconds=0.0)
    assert (view.samples_per_sec, view.loss, view.steps_per_sec) == (300, pytest.approx(0.6), None)


def test_metrics_are_those_of_the_first_worker_that_reports_them() -> None:
    view = view_of(member(1), member(1, auc=0.7), member(1, auc=0.6, test_metric="auc", test_value=0.75))
    assert (view.auc, view.test_metric, view.test_value) == (0.7, "auc", 0.75)


def test_what_is_not_known_is_none() -> None:
    silent = view_of(member(), member())
    assert (silent.samples_per_sec, silent.loss, silent.auc, silent.test_metric) == (None, None, None, "")
    assert silent.test_value is None
    still = view_of(member(0))
    assert (still.samples_per_sec, still.loss) == (0, None)
    assert view_of(member(1e300, 1e300), member(1e300, 1e300)).loss is None, "JSON has no such number"
    assert view_of(former=None).steps_per_sec is None
