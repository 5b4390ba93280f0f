"""The part of a status that one namespace, or a token of some namespaces, is shown."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from .. import control_pb2 as pb


def of_namespaces(reply: pb.GetStatusReply, namespaces: Collection[str]) -> pb.GetStatusReply:
    """Returns a copy of a status with the tables, jobs, faults and keys of some namespaces alone.

    Requests, times and memory of a shard are those of all namespaces, because a shard does not count them separately.
    """
    part = pb.GetStatusReply()
    part.CopyFrom(reply)
    ids = {table.id for table in reply.tables if table.namespace in namespaces}
    lists: tuple[Any, ...] = (part.tables, part.jobs, part.faults)
    for messages in lists:
        _keep(messages, lambda each: each.namespace in namespaces)
    for shard in part.shards:
        _keep(shard.tables, lambda usage: usage.table_id in ids)
        _keep(shard.load.hot_keys, lambda key: key.table_id in ids)
        _keep(shard.load.following, lambda each: each.namespace in namespaces)
    return part


def visible_to(reply: pb.GetStatusReply, namespaces: Collection[str] | None) -> pb.GetStatusReply:
    """Returns what a token is shown of a status.

    Besides :func:`of_namespaces` it leaves out the names of other namespaces, and the folder of checkpoints, which are
    of the whole cluster.

    Args:
        reply: the whole status, which is left as it is.
        namespaces: the namespaces that the token reaches; None means all, and the status itself is returned.
    """
    if namespaces is None:
        return reply
    part = of_namespaces(reply, namespaces)
    part.checkpoint = part.checkpoint.rpartition("/")[2]
    for shard in part.shards:
        torn = [each for each in shard.torn_namespaces if each in namespaces]
        del shard.torn_namespaces[:]
        shard.torn_namespaces.extend(torn)
    return part


def _keep(messages: Any, holds: Callable[[Any], bool]) -> None:
    """Removes the messages of a repeated field for which ``holds`` is false."""
    kept = [message for message in messages if holds(message)]
    if len(kept) < len(messages):
        copies = [type(message).FromString(message.SerializeToString()) for message in kept]
        del messages[:]
        messages.extend(copies)
