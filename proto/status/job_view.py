"""The jobs of a cluster and their workers, for screens and for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .. import control_pb2 as pb


@dataclass(frozen=True)
class MemberView:
    """A worker of a job.

    Attributes:
        step: the step that it reported last.
        lease_left_sec: the seconds until it loses its place; 0.0 while it waits to be admitted, or is late.
    """

    rank: int
    worker_id: int
    epoch: int
    step: int
    lease_left_sec: float


@dataclass(frozen=True)
class JobView:
    """A job.

    Attributes:
        job: the job, as NAMESPACE/NAME.
        complete: whether every rank has come.
        world_size: the number of its ranks.
        staleness: the steps by which a pull may be stale; None for a job without barrier.
        quorum: the number of workers of a step; 0: all.
        step: the lowest step that a worker has reported; None without workers.
        highest_step: the highest step that a worker has committed; None before the first.
        steps_per_sec: the steps per second, by the highest step; None after a single reading.
        samples_per_sec: the samples that workers train on per second, as they report with their heartbeats; None where
            they report none.
        loss: the mean loss of those samples, each before it was trained on; None without samples.
        auc: the AUC of recent samples, each before it was trained on, of the first worker that reports one.
        test_metric: the metric of the last test, as the first worker that has tested reports it; "": there was none.
        test_value: its value.
    """

    job: str
    complete: bool
    world_size: int
    staleness: int | None
    quorum: int
    step: int | None
    highest_step: int | None
    steps_per_sec: float | None
    samples_per_sec: float | None
    loss: float | None
    auc: float | None
    test_metric: str
    test_value: float | None
    members: tuple[MemberView, ...]


def job_views(before: pb.GetStatusReply | None, now: pb.GetStatusReply, seconds: float) -> tuple[JobView, ...]:
    """Returns the jobs of a status.

    Args:
        before: an earlier status; None leaves rates unknown.
        now: a later status of the same cluster.
        seconds: the seconds between them.
    """
    earlier = {job.job_id: job for job in ([] if before is None else before.jobs)}
    return tuple(_job(job, earlier.get(job.job_id), seconds) for job in now.jobs)


def _highest(job: pb.JobStatus) -> int | None:
    return job.highest_step if job.HasField("highest_step") else None


def _loss(members: Sequence[pb.MemberStatus]) -> float | None:
    """Returns the mean loss of workers' samples, by how many of them each trains on."""
    known = [each for each in members if each.HasField("loss")]
    weight = sum(each.samples_per_sec for each in known)
    loss = sum(each.loss * each.samples_per_sec for each in known) / weight if weight > 0 else math.inf
    return loss if math.isfinite(loss) else None


def _job(job: pb.JobStatus, before: pb.JobStatus | None, seconds: float) -> JobView:
    highest, steps = _highest(job), [member.step for member in job.members]
    rate = None
    if seconds > 0 and before is not None:
        former = _highest(before)
        if highest is not None and former is not None:
            rate = max(0, highest - former) / seconds
    rates = [each.samples_per_sec for each in job.members if each.HasField("samples_per_sec")]
    figures = [each.figures for each in job.members]
    tested = next((each for each in figures if each.test_metric), None)
    return JobView(
        job=f"{job.namespace}/{job.name}",
        complete=job.complete,
        world_size=job.world_size,
        staleness=job.staleness if job.HasField("staleness") else None,
        quorum=job.quorum,
        step=min(steps) if steps else None,
        highest_step=highest,
        steps_per_sec=rate,
        samples_per_sec=sum(rates) if rates else None,
        loss=_loss(job.members),
        auc=next((each.auc for each in figures if each.HasField("auc")), None),
        test_metric="" if tested is None else tested.test_metric,
        test_value=None if tested is None else tested.test_value,
        members=tuple(
            MemberView(each.rank, each.worker_id, each.epoch, each.step, each.lease_left_sec) for each in job.members
        ),
    )
