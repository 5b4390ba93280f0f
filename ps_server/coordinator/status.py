"""Builds the status that ``sparserow status`` shows, from the coordinator's state and the statistics of each shard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from ...proto import control_pb2 as pb
from ...proto.errors import SparserowError
from ...proto.schema_message import message_of_schema
from ...proto.security.fresh_security import fresh
from .procedures.shard_calls import ShardCalls
from .state.cluster import Cluster
from .state.faults import Fault
from .state.membership import Job
from .state.shards import Shard
from .state.stream_leases import JobStream


async def status_message(
    cluster: Cluster, shard_calls: ShardCalls, *, now: float, failure: str = "", damaged: Sequence[str] = ()
) -> pb.GetStatusReply:
    """Returns the whole status; a shard that does not answer appears with its problem.

    Args:
        cluster, shard_calls: the cluster that is shown.
        now: the present time on the clock of leases, in seconds.
        failure: why a shard cannot be recovered alone; empty when no recovery failed.
        damaged: the names of checkpoints that were found damaged.
    """
    # Members and leaving workers are read together, before the shards are asked, because the counts of shards have each
    # worker that has left by then.
    leaving = cluster.workers_leaving()
    jobs = [_job_status(job, now) for job in sorted(cluster.jobs.jobs.values(), key=lambda job: job.full_name)]
    steps: dict[int, int] = {}  # the highest step, by job id
    shards = await asyncio.gather(
        *(_shard_status(cluster, shard_calls, shard, steps) for shard in cluster.shards.shards)
    )
    for job in jobs:
        if job.job_id in steps:
            job.highest_step = steps[job.job_id]
        data = cluster.data.jobs.get(job.job_id)
        if isinstance(data, JobStream):
            counts = pb.StreamCounts(**vars(data.counts))
            job.stream.CopyFrom(
                pb.StreamStatus(
                    source=data.source,
                    counts=counts,
                    lag=data.lag,
                    parts=len(data.positions),
                    watermark=data.watermark,
                )
            )
    damage = cluster.damage.text if cluster.damage is not None else ""
    away = cluster.shards.problem()
    problem = "; ".join(filter(None, (away, failure))) if away else damage
    source, saved_at = cluster.rows_checkpoint, cluster.saved_at
    return pb.GetStatusReply(
        cluster_id=cluster.cluster_id,
        slot_count=cluster.slots.slot_count,
        route_epoch=cluster.slots.epoch,
        ready=not problem,
        problem=problem,
        damage=damage,
        security_problem=fresh().problem,
        leaving=leaving,
        shards=shards,
        tables=[message_of_schema(schema) for schema in cluster.registry.tables()],
        jobs=jobs,
        damaged_checkpoints=damaged,
        checkpoint="/".join(source) if source is not None else "",
        checkpoint_age_sec=None if source is None or saved_at is None else max(0.0, time.time() - saved_at),
        saves_failed=cluster.saves_failed,
        checkpoint_took_sec=cluster.save_took_sec,
        checkpoint_links=cluster.checkpoint_links,
        faults=[fault_message(replace(fault, traceback="")) for fault in cluster.faults.listed()],
    )


def fault_message(fault: Fault) -> pb.Fault:
    """Returns the message for a fault."""
    return pb.Fault(**asdict(fault))


async def _shard_status(
    cluster: Cluster, shard_calls: ShardCalls, shard: Shard, steps: dict[int, int]
) -> pb.ShardStatus:
    status = pb.ShardStatus(
        shard=shard.index,
        state=shard.phase.name,
        pid=shard.pid,
        slots=cluster.slots.slots_of(shard.index),
        restores=shard.restores,
    )
    if shard.control is not None:
        status.control.host, status.control.port = shard.control
    if shard.data is not None:
        status.data.host, status.data.port = shard.data
    status.commits_lost = cluster.lost.count(shard.index)
    status.losses_unknown = cluster.lost.unknown(shard.index)
    status.torn_namespaces.extend(cluster.lost.torn(shard.index))
    if not shard.is_live:
        return status
    try:
        stats = await shard_calls.stats(shard)
    except SparserowError as error:
        status.problem = str(error)
        return status
    if stats.security_problem:
        status.problem = f"security: the previous files stay in force: {stats.security_problem}"
    status.used_bytes, status.memory_budget_bytes = stats.used_bytes, stats.memory_budget_bytes
    status.reserved_bytes = stats.reserved_bytes
    status.requests, status.connections = stats.requests, stats.connections
    status.local_connections = stats.local_connections
    cluster.note_lost(shard.index, stats.lost)
    status.commits_lost = max(cluster.lost.count(shard.index), stats.commits_lost)
    status.tables.extend(stats.tables)
    status.load.CopyFrom(stats.load)
    if stats.HasField("tier"):
        status.tier.CopyFrom(stats.tier)
    for job_id, step in stats.job_steps.items():
        steps[job_id] = max(step, steps.get(job_id, step))
    return status


def _job_status(job: Job, now: float) -> pb.JobStatus:
    members = [
        pb.MemberStatus(
            rank=rank,
            worker_id=member.ticket.worker_id,
            epoch=member.ticket.epoch,
            lease_left_sec=max(0.0, member.expires_at - now) if member.admitted else 0.0,
            step=member.step,
            figures=member.training.figures,
            samples_per_sec=member.training.samples_per_sec,
            loss=member.training.loss,
        )
        for rank, member in sorted(job.members.items())
    ]
    return pb.JobStatus(
        job_id=job.job_id,
        namespace=job.namespace,
        name=job.name,
        world_size=job.terms.world_size,
        staleness=job.terms.staleness,
        grad_scale=job.terms.grad_scale.upper(),
        quorum=job.terms.quorum or 0,
        complete=job.gathered,
        members=members,
    )
