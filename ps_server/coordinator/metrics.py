"""The Prometheus metrics of the coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .state.cluster import Cluster
from .state.shards import ShardPhase
from .state.stream_leases import JobStream


class CoordinatorMetrics(Collector):
    """Collects the metrics of a cluster in the thread of the metrics server, from copies of small maps."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        """Yields the values of all metrics at this moment."""
        cluster = self._cluster
        shards = GaugeMetricFamily("sparserow_shards", "Shards by state (count).", labels=["state"])
        for phase in ShardPhase:
            count = sum(shard.phase is phase for shard in cluster.shards.shards)
            shards.add_metric([phase.name.lower()], count)
        yield shards
        restores = CounterMetricFamily(
            "sparserow_shard_restores",
            "Times that a shard came back from a checkpoint alone (count).",
            labels=["shard"],
        )
        for shard in cluster.shards.shards:
            restores.add_metric([str(shard.index)], shard.restores)
        yield restores
        lost = CounterMetricFamily(
            "sparserow_shard_commits_lost",
            "Commits and writes by key that a shard lacks since it came back from a checkpoint (count).",
            labels=["shard"],
        )
        unknown = CounterMetricFamily(
            "sparserow_shard_losses_unknown",
            "Workers that have left, of whose commits a shard lacks an unknown number (count).",
            labels=["shard"],
        )
        for shard in cluster.shards.shards:
            lost.add_metric([str(shard.index)], cluster.lost.count(shard.index))
            unknown.add_metric([str(shard.index)], cluster.lost.unknown(shard.index))
        yield lost
        yield unknown
        yield from _streams(cluster)
        ready = 0 if cluster.shards.problem() or cluster.damage is not None else 1
        words = "Whether every shard serves, and every table has its rows (0 or 1)."
        yield GaugeMetricFamily("sparserow_cluster_ready", words, ready)
        yield GaugeMetricFamily("sparserow_tables", "Tables on record (count).", len(cluster.registry.tables()))
        yield GaugeMetricFamily("sparserow_route_epoch", "Epoch of the slot map (number).", cluster.slots.epoch)
        yield CounterMetricFamily(
            "sparserow_saves_failed",
            "Saves that did not become a checkpoint, since the start (count).",
            value=cluster.saves_failed,
        )
        yield CounterMetricFamily(
            "sparserow_worker_faults",
            "Workers that ended by an exception or without a word, since the start (count).",
            value=cluster.faults.seen,
        )
        age = GaugeMetricFamily(
            "sparserow_checkpoint_age_seconds",
            "Age of the newest checkpoint that has all rows; absent without one (seconds).",
            labels=[],
        )
        if cluster.rows_checkpoint is not None and cluster.saved_at is not None:
            age.add_metric([], max(0.0, time.time() - cluster.saved_at))
        yield age
        workers = GaugeMetricFamily("sparserow_job_workers", "Live workers of a job (count).", labels=["job"])
        lease = GaugeMetricFamily(
            "sparserow_job_lease_left_seconds", "Shortest lease left among a job's workers (seconds).", labels=["job"]
        )
        step = GaugeMetricFamily(
            "sparserow_job_step", "Lowest step that a worker of a job has reported (number).", labels=["job"]
        )
        now = time.monotonic()
        for job in list(cluster.jobs.jobs.values()):
            members = [member for member in list(job.members.values()) if member.admitted]
            workers.add_metric([job.full_name], len(members))
            if members:
                lease.add_metric([job.full_name], max(0.0, min(member.expires_at for member in members) - now))
                step.add_metric([job.full_name], min(member.step for member in members))
        yield from (workers, lease, step)


def _streams(cluster: Cluster) -> Iterator[Metric]:
    """Yields how far jobs have read their streams."""
    lag = GaugeMetricFamily(
        "sparserow_stream_lag", "Events of a job's stream that are not read yet (count).", labels=["job"]
    )
    events = CounterMetricFamily(
        "sparserow_stream_events",
        "Events of a job's stream, by what became of them: trained, of which late and ahead are a part, dead, empty "
        "or lost (count).",
        labels=["job", "outcome"],
    )
    watermark = GaugeMetricFamily(
        "sparserow_stream_watermark_seconds",
        "Time since 1970 in UTC up to which all parts of a job's stream are read, by its events (seconds).",
        labels=["job"],
    )
    for job_id, data in list(cluster.data.jobs.items()):
        if isinstance(data, JobStream):
            name, counts = cluster.jobs.names.get(job_id, str(job_id)), data.counts
            lag.add_metric([name], data.lag)
            outcomes = {"trained" if each == "events" else each: count for each, count in vars(counts).items()}
            if data.watermark is not None:
                watermark.add_metric([name], data.watermark / 1e6)
            for outcome, count in outcomes.items():
                events.add_metric([name, outcome], count)
    yield from (lag, events, watermark)
