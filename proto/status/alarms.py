"""What is wrong with a cluster, in sentences with the command that mends it: the same on every screen."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import control_pb2 as pb
from .fault_view import FaultView
from .follower_view import FollowerView
from .shard_view import ShardView

RESTORE_UNDER_WAY = "rows are being restored from"  # begins the damage that ends by itself
MOST_ALARMS = 50
_MOST_MESSAGE = 300  # characters of a fault's message
_FRESH_FAULT_SEC = 3600.0  # later a fault stands in its table alone
_SILENT_SEC = 60.0  # a follower that has not called for longer is paused or gone
_AT = "--coordinator HOST:PORT"
_SHOW_SECURITY = "sparserow security show FILE"


@dataclass(frozen=True)
class Alarm:
    """Something that is wrong.

    Attributes:
        text: the sentence that names it.
        mend: the command that mends it, or shows more of it; empty where it ends by itself.
    """

    text: str
    mend: str


def alarms_of(
    now: pb.GetStatusReply, shards: Sequence[ShardView], faults: Sequence[FaultView], followers: Sequence[FollowerView]
) -> tuple[Alarm, ...]:
    """Returns what is wrong, the gravest first; at most ``MOST_ALARMS``, of which the last one counts the others.

    Args:
        now: the status.
        shards, faults, followers: its shards, faults and serving processes in figures.
    """
    found = [
        *_of_cluster(now),
        *_of_shards(now, shards),
        *_of_checkpoints(now),
        *_of_faults(faults),
        *_of_followers(followers),
    ]
    if len(found) <= MOST_ALARMS:
        return tuple(found)
    left = len(found) - MOST_ALARMS + 1
    return (*found[: MOST_ALARMS - 1], Alarm(f"{left} more things are wrong", f"sparserow status {_AT}"))


def not_ready_text(problem: str) -> str:
    """Returns the sentence of a cluster that is not ready."""
    return f"not ready: {problem}"


def lost_text(shard: ShardView) -> str:
    """Returns what a shard lacks since it came back from a checkpoint."""
    unknown = f", unknown of {shard.losses_unknown} workers" if shard.losses_unknown else ""
    torn = f"; rows of {', '.join(shard.torn_namespaces)} are older here" if shard.torn_namespaces else ""
    return f"{shard.commits_lost:,} commits{unknown}{torn}"


def _of_cluster(now: pb.GetStatusReply) -> Iterator[Alarm]:
    if not now.ready:
        yield Alarm(not_ready_text(now.problem), _mend_of_cluster(now))
    if now.security_problem:
        yield Alarm(f"security: the coordinator keeps the previous files: {now.security_problem}", _SHOW_SECURITY)


def _mend_of_cluster(now: pb.GetStatusReply) -> str:
    gone = [shard.shard for shard in now.shards if shard.state in (pb.MISSING, pb.LOST)]
    if gone:
        return f"sparserow ps {_AT} --shard {gone[0]}"
    if now.damage and not now.damage.startswith(RESTORE_UNDER_WAY):
        return f"sparserow checkpoint restore {_folder_of(now)} {_AT}"
    return ""


def _of_shards(now: pb.GetStatusReply, shards: Sequence[ShardView]) -> Iterator[Alarm]:
    for shard in shards:
        if shard.problem:
            is_security = shard.problem.startswith("security: ")
            mend = _SHOW_SECURITY if is_security else f"sparserow ps {_AT} --shard {shard.shard}"
            yield Alarm(f"shard {shard.shard}: {shard.problem}", mend)
    for shard in shards:
        if shard.commits_lost or shard.losses_unknown or shard.torn_namespaces:
            mend = f"sparserow checkpoint restore {_folder_of(now)} {_AT}"
            yield Alarm(f"shard {shard.shard} has lost {lost_text(shard)}", mend)


def _of_checkpoints(now: pb.GetStatusReply) -> Iterator[Alarm]:
    if now.damaged_checkpoints:
        names = ", ".join(now.damaged_checkpoints)
        yield Alarm(f"damaged checkpoints: {names}", f"sparserow checkpoint save {_folder_of(now)} {_AT}")


def _folder_of(now: pb.GetStatusReply) -> str:
    """Returns the folder of checkpoints as a word of a shell, because commands are pasted and a client has named it."""
    return shlex.quote(now.checkpoint.rpartition("/")[0]) if "/" in now.checkpoint else "URL"


def _of_faults(faults: Sequence[FaultView]) -> Iterator[Alarm]:
    """Yields the first fault of the newest incident, while it is fresh."""
    for fault in faults[:1]:
        if time.time() - fault.time < _FRESH_FAULT_SEC:
            message = fault.message if len(fault.message) <= _MOST_MESSAGE else f"{fault.message[:_MOST_MESSAGE]}…"
            yield Alarm(f"job {fault.job}: {fault.where} has failed: {message}", f"sparserow status --faults {_AT}")


def _of_followers(followers: Sequence[FollowerView]) -> Iterator[Alarm]:
    for each in followers:
        if each.goal_sec is None or each.silent_sec > _SILENT_SEC:
            continue
        address = each.process.rpartition("/")[2]
        mend = f"sparserow status --serving {shlex.quote(address)} {_AT}"
        where = f"{each.model} at {address}"
        if (each.behind_sec or 0.0) > each.goal_sec:
            yield Alarm(
                f"{where} has not had all changes for {each.behind_sec:,.0f} s; goal: {each.goal_sec:g} s", mend
            )
        elif (each.fresh_p99_sec or 0.0) > each.goal_sec:
            more = f"{each.fresh_p99_sec:,.0f} s" if math.isfinite(each.fresh_p99_sec or 0.0) else "over a minute"
            yield Alarm(f"{where}: 1 of 100 changes is served after {more}; goal: {each.goal_sec:g} s", mend)
