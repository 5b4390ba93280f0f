"""The serving processes that follow a cluster, as they say of themselves, for screens and for JSON."""

from __future__ import annotations

from dataclasses import dataclass

from .. import control_pb2 as pb

_SERVING = "serving/"  # what names of their cursors begin with


@dataclass(frozen=True)
class FollowerView:
    """A version of a model in a serving process that follows the cluster.

    Attributes:
        process: the process, as ``serving/PART/PARTS.REPLICA/HOST:PORT``.
        model: ``MODEL@VERSION``.
        shards: the number of shards that it follows.
        aliases: the aliases that name it, in words; "": none.
        behind_sec: the seconds since it last had all changes of every shard; None: it never had, or does not say.
        fresh_p50_sec, fresh_p99_sec: quantiles of the time from a change to where it is served, in seconds, in
            the last two minutes; None: no change came.
        goal_sec: what fresh_p99_sec should be below; None: not said.
        silent_sec: the seconds since the last call that reached a shard.
    """

    process: str
    model: str
    aliases: str
    shards: int
    behind_sec: float | None
    fresh_p50_sec: float | None
    fresh_p99_sec: float | None
    goal_sec: float | None
    silent_sec: float


def follower_views(status: pb.GetStatusReply) -> tuple[FollowerView, ...]:
    """Returns the followers of a status; what one says of itself to several shards is as the newest call says it."""
    found: dict[str, list[pb.FollowerLoad]] = {}
    for shard in status.shards:
        for each in shard.load.following:
            if each.cursor.startswith(_SERVING):
                found.setdefault(each.cursor.rpartition("/")[0], []).append(each)
    return tuple(_view(name, loads) for name, loads in sorted(found.items()))


def _view(name: str, loads: list[pb.FollowerLoad]) -> FollowerView:
    newest = min(loads, key=lambda each: each.silent_sec)
    process, _, model = name.rpartition("/")

    def known(field: str) -> float | None:
        return getattr(newest.figures, field) if newest.figures.HasField(field) else None

    return FollowerView(
        process,
        model,
        newest.figures.aliases,
        len(loads),
        known("behind_sec"),
        known("fresh_p50_sec"),
        known("fresh_p99_sec"),
        known("goal_sec"),
        newest.silent_sec,
    )
