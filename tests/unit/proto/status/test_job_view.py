"""What workers report of their training, as rates and the mean loss between two readings of the status."""

from __future__ import annotations

import math

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.status.job_view import JobView, job_views


def reply(*members: tuple[int, int, int, float], highest: int = 10) -> pb.GetStatusReply:
    """A status with one job; a member is its worker id, epoch, samples and sum of losses."""
    job = pb.JobStatus(job_id=1, namespace="ads", name="ctr", world_size=2, highest_step=highest)
    for rank, (worker, epoch, samples, loss_sum) in enumerate(members):
        job.members.add(rank=rank, worker_id=worker, epoch=epoch, samples=samples, loss_sum=loss_sum)
    return pb.GetStatusReply(jobs=[job])


def between(before: pb.GetStatusReply | None, now: pb.GetStatusReply, seconds: float = 2.0) -> JobView:
    (view,) = job_views(before, now, seconds)
    return view


def test_samples_and_loss_are_of_the_time_between() -> None:
    view = between(reply((1, 0, 100, 60.0), (2, 0, 50, 40.0)), reply((1, 0, 300, 160.0), (2, 0, 150, 60.0), highest=14))
    assert (view.samples_per_sec, view.loss, view.steps_per_sec) == (150, pytest.approx(120 / 300), 2)


def test_a_worker_that_came_anew_counts_from_its_coming() -> None:
    view = between(reply((1, 0, 1000, 500.0)), reply((1, 1, 40, 10.0), (3, 0, 10, 5.0)))
    assert (view.samples_per_sec, view.loss) == (25, pytest.approx(0.3))


def test_what_is_not_known_is_none() -> None:
    now = reply((1, 0, 300, 160.0))
    assert between(None, now).samples_per_sec is None
    assert between(None, now).loss is None
    silent = between(reply((1, 0, 0, 0.0)), reply((1, 0, 0, 0.0), highest=12))
    assert (silent.samples_per_sec, silent.loss, silent.steps_per_sec) == (None, None, 1), "a loop of one's own"
    still = between(now, now)
    assert (still.samples_per_sec, still.loss) == (0, None)
    bad = between(now, reply((1, 0, 400, math.nan)))
    assert (bad.samples_per_sec, bad.loss) == (50, None), "JSON has no such number"
    assert between(now, now, 0.0).samples_per_sec is None
