"""A client's view of the serving processes: their shards, versions and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from ...proto import serving_pb2 as pb, serving_pb2_grpc as pb_grpc
from ...proto.coordinators import parse_address
from ...proto.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SparserowError,
    Unavailable,
)
from ...proto.grpc_status import error_of_status
from ...proto.security.security import Security, open_channel
from .shard_assignment import ShardAssignment


@dataclass(frozen=True)
class TableShape:
    """A table as a lookup names it."""

    id: int
    schema_version: int
    dim: int


@dataclass(frozen=True)
class ReplicaMap:
    """The serving processes at one moment.

    Attributes:
        slot_owner: (slot_count) shard of each slot.
        route_epoch: of it.
        endpoints: for each shard the data-plane addresses of its replicas; a Unix socket is ("unix:PATH", 0).
        versions: by model, the versions that every shard can answer from, with their tables.
        aliases: by (model, alias): version, canary version (0: none) and its share, of each process that said so.
    """

    slot_owner: NDArray[np.uint16]
    route_epoch: int
    endpoints: tuple[tuple[tuple[str, int], ...], ...]
    versions: dict[str, dict[int, dict[str, TableShape]]]
    aliases: dict[tuple[str, str], tuple[tuple[int, int, float], ...]]

    def alias(self, model: str, name: str, current: int | None) -> tuple[int, int, float]:
        """Version, canary version (0: none) and its share. While processes disagree, as they do for a moment when an
        alias moves, the version in use stays as long as all have it.

        Raises:
            NotFound: there is no such alias, or not everywhere yet.
        """
        known = self.versions.get(model, {})
        if name.isdecimal():
            if int(name) not in known:
                raise NotFound(f"model {model}@{name}: is not served; served: {self._served()}")
            return int(name), 0, 0.0
        said = [entry for entry in self.aliases.get((model, name), ()) if entry[0] in known]
        if not said:
            raise NotFound(f"model {model}@{name}: is not served by every shard; served: {self._served()}")
        version, canary, share = next(
            (entry for entry in said if len(set(said)) > 1 and entry[0] == current), max(said)
        )
        return (version, canary, share) if canary in known else (version, 0, 0.0)

    def _served(self) -> str:
        return ", ".join(f"{model}@{alias}" for model, alias in sorted(self.aliases)) or "nothing"


def fetch_view(
    addresses: Sequence[str], *, local: bool, deadline_sec: float, security: Security | None = None
) -> ReplicaMap:
    """Asks every address what it serves; those that do not answer are left out.

    Args:
        addresses: ``HOST:PORT`` of gRPC of each process.
        local: prefer Unix sockets where a process of this machine has one.
        deadline_sec: of each question; they are asked at once.
        security: None: the process's.

    Raises:
        Unavailable: no process answers for some shard (the error names it, or says why none answered at all).
        FailedPrecondition: the processes do not belong together.
    """
    replies, failure = _ask(addresses, deadline_sec, security)
    if not replies:
        raise failure or InvalidArgument("ServingClient: addresses: is empty; allowed: HOST:PORT, ...")
    ready = [reply for reply in replies if reply.versions]
    if not ready:
        raise Unavailable(f"{', '.join(addresses)}: no version is loaded yet")
    if len({(reply.shards, reply.slot_count) for reply in ready}) != 1:
        raise FailedPrecondition(f"{', '.join(addresses)}: these processes have different numbers of shards or slots")
    shards = ready[0].shards
    by_shard: list[list[pb.DescribeReply]] = [[] for _ in range(shards)]
    for reply in ready:
        by_shard[reply.shard].append(reply)
    for shard, answered in enumerate(by_shard):
        if not answered:
            raise Unavailable(
                f"serving shard {shard} of {shards}: none of the given addresses answers for it"
                + (f" ({failure})" if failure is not None else "")
            )
    place = ShardAssignment(0, shards)
    return ReplicaMap(
        slot_owner=place.owners(ready[0].slot_count),
        route_epoch=place.route_epoch,
        endpoints=tuple(
            tuple(_endpoint(reply, local) for reply in sorted(answered, key=lambda reply: reply.replica))
            for answered in by_shard
        ),
        versions=_common_versions(by_shard),
        aliases=_aliases(ready),
    )


def _ask(
    addresses: Sequence[str], deadline_sec: float, security: Security | None
) -> tuple[list[pb.DescribeReply], SparserowError | None]:
    channels = [open_channel(_checked(address), security) for address in addresses]
    try:
        stubs: list[Any] = [pb_grpc.ServingStub(channel) for channel in channels]
        calls = [stub.Describe.future(pb.DescribeRequest(), timeout=deadline_sec) for stub in stubs]
        replies: list[pb.DescribeReply] = []
        failure: SparserowError | None = None
        for address, call in zip(addresses, calls, strict=True):
            try:
                replies.append(call.result())
            except grpc.RpcError as error:
                failure = error_of_status(
                    error, f"serving process {address}", remedy="; start it with `sparserow serve`"
                )
        return replies, failure
    finally:
        for channel in channels:
            channel.close()


def _checked(address: str) -> str:
    parse_address(address, what="ServingClient: address")
    return address


def _endpoint(reply: pb.DescribeReply, local: bool) -> tuple[str, int]:
    return (f"unix:{reply.unix_path}", 0) if local and reply.unix_path else (reply.data_host, reply.data_port)


def _common_versions(by_shard: list[list[pb.DescribeReply]]) -> dict[str, dict[int, dict[str, TableShape]]]:
    """Versions that each process has."""
    everybody = [reply for answered in by_shard for reply in answered]
    counts: dict[tuple[str, int], int] = {}
    shapes: dict[str, dict[int, dict[str, TableShape]]] = {}
    for reply in everybody:
        for served in reply.versions:
            key = (served.model, served.version)
            counts[key] = counts.get(key, 0) + 1
            if counts[key] == len(everybody):
                tables = {entry.name: TableShape(entry.id, entry.schema_version, entry.dim) for entry in served.tables}
                shapes.setdefault(served.model, {})[served.version] = tables
    return shapes


def _aliases(replies: list[pb.DescribeReply]) -> dict[tuple[str, str], tuple[tuple[int, int, float], ...]]:
    said: dict[tuple[str, str], tuple[tuple[int, int, float], ...]] = {}
    for reply in replies:
        for alias in reply.aliases:
            key = (alias.model, alias.alias)
            said[key] = (*said.get(key, ()), (alias.version, alias.canary, alias.canary_share))
    return said
