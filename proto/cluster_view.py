"""A cluster as its clients need it: where the shards are, and which shard has which slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import control_pb2 as pb
from .route import owners_of_runs


@dataclass(frozen=True)
class ShardAddress:
    """The index of a shard, and the address on which its data plane listens."""

    index: int
    host: str
    port: int


@dataclass(frozen=True)
class ClusterView:
    """A cluster as a client needs it.

    Attributes:
        cluster_id: the random 64-bit number that the cluster got at creation; a shard checks it in a client's HELLO.
        slot_count: the number of slots, a power of two.
        route_epoch: the version of the slot map, which rises whenever a slot changes its owner.
        slot_owner: (slot_count) uint16, the shard index of each slot.
        shards: the addresses of the shards, in the order of their indexes.
    """

    cluster_id: int
    slot_count: int
    route_epoch: int
    slot_owner: NDArray[np.uint16]
    shards: tuple[ShardAddress, ...]

    @staticmethod
    def of_reply(reply: pb.GetClusterReply) -> ClusterView:
        """Returns the view that the coordinator's reply has."""
        return ClusterView(
            cluster_id=reply.cluster_id,
            slot_count=reply.route.slot_count,
            route_epoch=reply.route.epoch,
            slot_owner=owners_of_runs([(run.start, run.shard) for run in reply.route.runs], reply.route.slot_count),
            shards=tuple(ShardAddress(s.shard, s.data.host, s.data.port) for s in reply.shards),
        )
