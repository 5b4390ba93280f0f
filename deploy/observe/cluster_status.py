"""A cluster in figures, from two readings of its status, for ``sparserow status``, ``status --json`` and ``top``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...proto import control_pb2 as pb
from ...proto.control import ControlClient
from ...proto.errors import NotFound
from .fault_view import FaultView, fault_views
from .stream_view import StreamView, stream_views

MOST_HOT_KEYS = 10


@dataclass(frozen=True)
class Times:
    """How long the requests of one kind took.

    Attributes:
        per_sec: the requests per second; None after a single reading.
        p50_sec, p99_sec: quantiles in seconds; None when there was no request, and infinite beyond the last bucket.
    """

    kind: str
    per_sec: float | None
    p50_sec: float | None
    p99_sec: float | None


@dataclass(frozen=True)
class ShardView:
    """The figures of one shard. Rates are per second between the readings; they are None after a single reading.

    Attributes:
        memory_bytes: the memory of rows and indexes; ``budget_bytes`` is its bound, 0 for none.
        reserved_bytes: the memory that has pages before a row needs them, beside ``memory_bytes``.
        ssd_bytes: the size of the files on the SSD; None without an SSD.
        followers: the number of serving processes that follow its changes.
        times: the times by kind of request, of the kinds that occurred.
    """

    shard: int
    state: str
    problem: str
    slots: int
    rows: int
    ssd_rows: int
    memory_bytes: int
    reserved_bytes: int
    budget_bytes: int
    ssd_bytes: int | None
    connections: int
    local_connections: int
    requests: int
    requests_per_sec: float | None
    rows_pulled_per_sec: float | None
    rows_applied_per_sec: float | None
    bytes_per_sec: float | None
    followers: int
    restores: int
    commits_lost: int
    losses_unknown: int
    torn_namespaces: tuple[str, ...]
    times: tuple[Times, ...]

    def p99(self, *kinds: str) -> float | None:
        """Returns the largest p99 of these kinds in seconds; None when there was no such request."""
        return max(
            (each.p99_sec for each in self.times if each.kind in kinds and each.p99_sec is not None), default=None
        )


@dataclass(frozen=True)
class TableView:
    """The staleness in steps of a table's pulls that named a step, since the start; None when
    there was no such pull.
    """

    table: str
    rows: int
    staleness_p50: float | None
    staleness_p99: float | None


@dataclass(frozen=True)
class HotKeyView:
    """A key that is read often.

    Attributes:
        share: the share of the key in all recent pulls and lookups of its shard, as sampled.
        per_sec: the estimated reads per second; None after a single reading.
    """

    table: str
    key: int
    shard: int
    share: float
    per_sec: float | None


@dataclass(frozen=True)
class ClusterStatus:
    """A cluster at one moment.

    Attributes:
        over_sec: the seconds between the readings; 0 after a single reading, whose times are since the start.
        checkpoint: the URL of the newest checkpoint that has all rows; empty when there is none.
        leaving: the workers that have left and of whom shards have not all heard; what shards lost of them is not
            counted yet.
        skew: the largest value over the mean of the shards, by compared quantity; 1 is even. None when nothing was
            measured.
    """

    cluster_id: str
    ready: bool
    problem: str
    security_problem: str
    slots: int
    route_epoch: int
    over_sec: float
    shards: tuple[ShardView, ...]
    tables: tuple[TableView, ...]
    hot_keys: tuple[HotKeyView, ...]
    skew: dict[str, float | None]
    checkpoint: str
    checkpoint_age_sec: float | None
    damaged_checkpoints: tuple[str, ...]
    leaving: int
    faults: tuple[FaultView, ...]
    streams: tuple[StreamView, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; a time or staleness beyond the last bucket is the text "beyond"."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def of_namespace(reply: pb.GetStatusReply, namespace: str | None) -> pb.GetStatusReply:
    """Returns the status of one namespace: its tables, jobs, faults and keys; None returns the whole status.

    Requests, times and memory of a shard are those of all namespaces, because a shard does not count them separately.

    Raises:
        NotFound: the cluster has nothing of that namespace; the text names the existing ones.
    """
    if namespace is None:
        return reply
    lists: tuple[Any, ...] = (reply.tables, reply.jobs, reply.faults)
    known = {each.namespace for each in itertools.chain(*lists)}
    if namespace not in known:
        named = ", ".join(sorted(known)) or "none"
        raise NotFound(f"--namespace {namespace!r}: the cluster has no table, job or fault of it; namespaces: {named}")
    part = pb.GetStatusReply()
    part.CopyFrom(reply)
    ids = {table.id for table in reply.tables if table.namespace == namespace}
    for mine in (part.tables, part.jobs, part.faults):
        _keep(mine, lambda each: each.namespace == namespace)
    for shard in part.shards:
        _keep(shard.tables, lambda usage: usage.table_id in ids)
        _keep(shard.load.hot_keys, lambda key: key.table_id in ids)
    return part


def _keep(messages: Any, holds: Callable[[Any], bool]) -> None:
    for place in reversed(range(len(messages))):
        if not holds(messages[place]):
            del messages[place]


def look(
    client: ControlClient,
    over_sec: float,
    sleep: Callable[[float], object] = time.sleep,
    *,
    namespace: str | None = None,
) -> tuple[pb.GetStatusReply, ClusterStatus]:
    """Reads the status once, or twice with ``over_sec`` seconds between the readings.

    Args:
        client: the client of the coordinator.
        over_sec: the seconds between the readings; 0 reads once.
        sleep: waits for so many seconds.
        namespace: the namespace to show; None shows all.

    Returns:
        The last status and its figures.

    Raises:
        NotFound: the cluster has nothing of that namespace.
        SparserowError: the coordinator cannot be reached.
    """
    first, began = of_namespace(client.status(), namespace), time.monotonic()
    if over_sec <= 0:
        return first, view_of(None, first, 0.0)
    sleep(over_sec)
    second = of_namespace(client.status(), namespace)
    return second, view_of(first, second, time.monotonic() - began)


def view_of(before: pb.GetStatusReply | None, now: pb.GetStatusReply, seconds: float) -> ClusterStatus:
    """Computes the figures of a status.

    Args:
        before: an earlier status; None leaves rates unknown, and times are since the start.
        now: a later status of the same cluster.
        seconds: the seconds between them.
    """
    earlier = {shard.shard: shard for shard in before.shards} if before is not None else {}
    shards = tuple(_shard(earlier.get(shard.shard), shard, seconds) for shard in now.shards)
    return ClusterStatus(
        cluster_id=f"{now.cluster_id:016x}",
        ready=now.ready,
        problem=now.problem,
        security_problem=now.security_problem,
        slots=now.slot_count,
        route_epoch=now.route_epoch,
        over_sec=seconds,
        shards=shards,
        tables=_tables(now),
        hot_keys=_hot_keys(now, shards),
        skew={
            "rows": skew([shard.rows for shard in shards]),
            "bytes": skew([shard.memory_bytes + (shard.ssd_bytes or 0) for shard in shards]),
            "requests": skew(_measured(shard.requests_per_sec for shard in shards)),
            "rows pulled": skew(_measured(shard.rows_pulled_per_sec for shard in shards)),
        },
        checkpoint=now.checkpoint,
        damaged_checkpoints=tuple(now.damaged_checkpoints),
        leaving=now.leaving,
        checkpoint_age_sec=now.checkpoint_age_sec if now.HasField("checkpoint_age_sec") else None,
        faults=fault_views(now.faults),
        streams=stream_views(before, now, seconds),
    )


def quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """Returns the ``q``-quantile of a histogram, interpolated linearly within its bucket.

    Args:
        bounds: the upper ends of the buckets, ascending.
        counts: the count of each bucket; one more than there are bounds.
        q: the quantile, in [0, 1].

    Returns:
        None for an empty histogram; infinity when the quantile is beyond the last bound.
    """
    total = sum(counts)
    if total == 0:
        return None
    rank, below = q * total, 0
    for low, high, count in zip([0.0, *bounds], bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below += count
    return float("inf")


def skew(values: Sequence[float]) -> float | None:
    """Returns the largest value over the mean; None when there are no values, or all are 0."""
    mean = sum(values) / len(values) if values else 0.0
    return max(values) / mean if mean > 0 else None


def _measured(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _shard(before: pb.ShardStatus | None, now: pb.ShardStatus, seconds: float) -> ShardView:
    # A shard that was restarted between the readings counts from its start.
    is_same = before is not None and before.load.up_sec <= now.load.up_sec and before.pid == now.pid

    def rate(name: str, of: Callable[[pb.ShardStatus], Any] = lambda shard: shard.load) -> float | None:
        if seconds <= 0 or not now.HasField("load"):
            return None
        gone = getattr(of(before), name) if is_same and before is not None else 0
        return max(0.0, float(getattr(of(now), name) - gone)) / seconds

    received, sent = rate("bytes_received"), rate("bytes_sent")
    return ShardView(
        shard=now.shard,
        state=pb.ShardState.Name(now.state).lower(),
        problem=now.problem,
        slots=now.slots,
        rows=sum(usage.rows for usage in now.tables),
        ssd_rows=sum(usage.ssd_rows for usage in now.tables),
        memory_bytes=now.used_bytes,
        reserved_bytes=now.reserved_bytes,
        budget_bytes=now.memory_budget_bytes,
        ssd_bytes=now.tier.file_bytes if now.HasField("tier") else None,
        connections=now.connections,
        local_connections=now.local_connections,
        requests=now.requests,
        requests_per_sec=rate("requests", lambda shard: shard),
        rows_pulled_per_sec=rate("rows_pulled"),
        rows_applied_per_sec=rate("rows_applied"),
        bytes_per_sec=None if received is None or sent is None else received + sent,
        followers=now.load.followers,
        restores=now.restores,
        commits_lost=now.commits_lost,
        losses_unknown=now.losses_unknown,
        torn_namespaces=tuple(now.torn_namespaces),
        times=tuple(_times(before if is_same else None, now, seconds)),
    )


def _times(before: pb.ShardStatus | None, now: pb.ShardStatus, seconds: float) -> Iterable[Times]:
    gone = {times.kind: times.requests for times in before.load.times} if before is not None and seconds > 0 else {}
    for times in now.load.times:
        if not any(times.requests):
            continue
        counts = [a - b for a, b in itertools.zip_longest(times.requests, gone.get(times.kind, ()), fillvalue=0)]
        bounds = now.load.time_bounds_sec
        yield Times(
            times.kind,
            sum(counts) / seconds if seconds > 0 else None,
            quantile(bounds, counts, 0.5),
            quantile(bounds, counts, 0.99),
        )


def _tables(now: pb.GetStatusReply) -> tuple[TableView, ...]:
    views = []
    for table in now.tables:
        usages = [usage for shard in now.shards for usage in shard.tables if usage.table_id == table.id]
        buckets: dict[int, int] = {}
        for bucket in (bucket for usage in usages for bucket in usage.staleness):
            buckets[bucket.at_most] = buckets.get(bucket.at_most, 0) + bucket.pulls
        bounds = sorted(buckets)
        views.append(
            TableView(
                f"{table.namespace}/{table.name}",
                sum(usage.rows for usage in usages),
                _step_quantile(bounds, [buckets[bound] for bound in bounds], 0.5),
                _step_quantile(bounds, [buckets[bound] for bound in bounds], 0.99),
            )
        )
    return tuple(views)


def _step_quantile(bounds: Sequence[int], counts: Sequence[int], q: float) -> float | None:
    """Returns the upper end of the quantile's bucket, because steps are whole; infinity beyond the last bound."""
    rank = q * sum(counts)
    for bound, total in zip(bounds, itertools.accumulate(counts), strict=True):
        if total and total >= rank:
            return float("inf") if bound == 2**64 - 1 else float(bound)
    return None


def _hot_keys(now: pb.GetStatusReply, shards: Sequence[ShardView]) -> tuple[HotKeyView, ...]:
    """Returns the hottest keys by rate, or by share on shards without a pull between the readings."""
    names = {table.id: f"{table.namespace}/{table.name}" for table in now.tables}
    found = []
    for status, view in zip(now.shards, shards, strict=True):
        for key in status.load.hot_keys:
            share = (key.count - key.error) / status.load.samples
            rate = None if view.rows_pulled_per_sec is None else share * view.rows_pulled_per_sec
            if key.count > key.error + 1:
                found.append(HotKeyView(names.get(key.table_id, str(key.table_id)), key.key, status.shard, share, rate))
    found.sort(key=lambda each: (-(each.per_sec or 0.0), -each.share, each.key))
    return tuple(found[:MOST_HOT_KEYS])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return "beyond" if value == float("inf") else value
