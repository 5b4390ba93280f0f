"""A cluster in figures, from two readings of its status: for ``sparserow status``, ``status --json``, ``top``, and the
page of the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import control_pb2 as pb
from .alarms import Alarm, alarms_of
from .fault_view import FaultView, fault_views
from .figures import measured, skew
from .follower_view import FollowerView, follower_views
from .job_view import JobView, job_views
from .shard_view import ShardView, shard_view
from .stream_view import StreamView, stream_views
from .table_view import TableView, table_views

MOST_HOT_KEYS = 10


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
        checkpoint_took_sec: the seconds that its save took; None where this coordinator did not save it.
        checkpoint_links: the checkpoints that its rows lie in, itself among them; None: not known.
        saves_failed: the saves that did not become a checkpoint, since the start of the coordinator.
        leaving: the workers that have left and of whom shards have not all heard; what shards lost of them is not
            counted yet.
        skew: the largest value over the mean of the shards, by compared quantity; 1 is even. None when nothing was
            measured.
        followers: the serving processes that follow the cluster.
        wrong: what is wrong, the gravest first, with the command that mends it.
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
    jobs: tuple[JobView, ...]
    hot_keys: tuple[HotKeyView, ...]
    skew: dict[str, float | None]
    checkpoint: str
    checkpoint_age_sec: float | None
    checkpoint_took_sec: float | None
    checkpoint_links: int | None
    saves_failed: int
    damaged_checkpoints: tuple[str, ...]
    leaving: int
    faults: tuple[FaultView, ...]
    streams: tuple[StreamView, ...]
    followers: tuple[FollowerView, ...]
    wrong: tuple[Alarm, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; a time or staleness beyond the last bucket is the text "beyond"."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def view_of(before: pb.GetStatusReply | None, now: pb.GetStatusReply, seconds: float) -> ClusterStatus:
    """Computes the figures of a status.

    Args:
        before: an earlier status; None leaves rates unknown, and times are since the start.
        now: a later status of the same cluster.
        seconds: the seconds between them.
    """
    earlier = {shard.shard: shard for shard in before.shards} if before is not None else {}
    shards = tuple(shard_view(earlier.get(shard.shard), shard, seconds) for shard in now.shards)
    faults, followers = fault_views(now.faults), follower_views(now)
    return ClusterStatus(
        cluster_id=f"{now.cluster_id:016x}",
        ready=now.ready,
        problem=now.problem,
        security_problem=now.security_problem,
        slots=now.slot_count,
        route_epoch=now.route_epoch,
        over_sec=seconds,
        shards=shards,
        tables=table_views(now),
        jobs=job_views(before, now, seconds),
        hot_keys=_hot_keys(now, shards),
        skew={
            "rows": skew([shard.rows for shard in shards]),
            "bytes": skew([shard.memory_bytes + (shard.ssd_bytes or 0) for shard in shards]),
            "requests": skew(measured(shard.requests_per_sec for shard in shards)),
            "rows pulled": skew(measured(shard.rows_pulled_per_sec for shard in shards)),
        },
        checkpoint=now.checkpoint,
        damaged_checkpoints=tuple(now.damaged_checkpoints),
        leaving=now.leaving,
        checkpoint_age_sec=now.checkpoint_age_sec if now.HasField("checkpoint_age_sec") else None,
        checkpoint_took_sec=now.checkpoint_took_sec if now.HasField("checkpoint_took_sec") else None,
        checkpoint_links=now.checkpoint_links or None,
        saves_failed=now.saves_failed,
        faults=faults,
        streams=stream_views(before, now, seconds),
        followers=followers,
        wrong=alarms_of(now, shards, faults, followers),
    )


def document_of(view: ClusterStatus, serving: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Returns the document that ``status --json`` writes, and the page of a coordinator shows.

    Args:
        view: the figures of the cluster.
        serving: the serving processes that were asked, as plain values.
    """
    return {**view.as_dict(), "serving": [*serving]}


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
