"""One shard in figures, for screens and for JSON."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .. import control_pb2 as pb
from .figures import quantile


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
        rows_evicted: the rows that went from memory to the SSD, since its start; None without an SSD.
        address: ``HOST:PORT`` of its data plane; empty while it has none.
        pid: the id of its process; 0 while it has none.
        followers: the number of serving processes that follow its changes.
        followers_behind_sec: the seconds since the one that is farthest behind last had all changes of the shard; None:
            none has had them yet, or says so.
        pulls_waiting: the pulls that wait for the clock of their job.
        times: the times by kind of request, of the kinds that occurred.
    """

    shard: int
    state: str
    problem: str
    address: str
    pid: int
    slots: int
    rows: int
    ssd_rows: int
    memory_bytes: int
    reserved_bytes: int
    budget_bytes: int
    ssd_bytes: int | None
    rows_evicted: int | None
    connections: int
    local_connections: int
    requests: int
    requests_per_sec: float | None
    rows_pulled_per_sec: float | None
    rows_applied_per_sec: float | None
    bytes_per_sec: float | None
    followers: int
    followers_behind_sec: float | None
    pulls_waiting: int
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


def shard_view(before: pb.ShardStatus | None, now: pb.ShardStatus, seconds: float) -> ShardView:
    """Computes the figures of a shard.

    Args:
        before: an earlier status of the shard; None leaves rates unknown.
        now: a later status of it.
        seconds: the seconds between them.
    """
    # A shard that was restarted between the readings counts from its start.
    is_same = before is not None and before.load.up_sec <= now.load.up_sec and before.pid == now.pid

    def rate(name: str, of: Callable[[pb.ShardStatus], Any] = lambda shard: shard.load) -> float | None:
        if seconds <= 0 or not now.HasField("load"):
            return None
        gone = getattr(of(before), name) if is_same and before is not None else 0
        return max(0.0, float(getattr(of(now), name) - gone)) / seconds

    figures = [each.figures for each in now.load.following]
    behind = [each.shard_behind_sec for each in figures if each.HasField("shard_behind_sec")]
    received, sent = rate("bytes_received"), rate("bytes_sent")
    return ShardView(
        shard=now.shard,
        state=pb.ShardState.Name(now.state).lower(),
        problem=now.problem,
        address=f"{now.data.host}:{now.data.port}" if now.data.port else "",
        pid=now.pid,
        slots=now.slots,
        rows=sum(usage.rows for usage in now.tables),
        ssd_rows=sum(usage.ssd_rows for usage in now.tables),
        memory_bytes=now.used_bytes,
        reserved_bytes=now.reserved_bytes,
        budget_bytes=now.memory_budget_bytes,
        ssd_bytes=now.tier.file_bytes if now.HasField("tier") else None,
        rows_evicted=now.tier.rows_evicted if now.HasField("tier") else None,
        connections=now.connections,
        local_connections=now.local_connections,
        requests=now.requests,
        requests_per_sec=rate("requests", lambda shard: shard),
        rows_pulled_per_sec=rate("rows_pulled"),
        rows_applied_per_sec=rate("rows_applied"),
        bytes_per_sec=None if received is None or sent is None else received + sent,
        followers=now.load.followers,
        followers_behind_sec=max(behind, default=None),
        pulls_waiting=now.load.pulls_waiting,
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
