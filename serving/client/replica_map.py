"""A client's map of the serving processes: their shards, addresses, versions and tables."""

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
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SparserowError,
    Unavailable,
)
from ...proto.grpc_status import error_of_status
from ...proto.published.model_names import is_version
from ...proto.security.channels import SecureChannel
from ...proto.security.fresh_security import FreshSecurity
from .shard_assignment import ShardAssignment


@dataclass(frozen=True)
class TableShape:
    """The facts about a table that a lookup needs.

    Attributes:
        id: the table's id.
        schema_version: the version of its schema.
        dim: the number of columns.
    """

    id: int
    schema_version: int
    dim: int


@dataclass(frozen=True)
class ReplicaMap:
    """The serving processes at one moment.

    Attributes:
        slot_owner: the shard of each slot, (slot_count) uint16.
        route_epoch: the epoch of ``slot_owner``.
        endpoints: for each shard, the data-plane addresses of its replicas.
        versions: for each model, the versions that every process has, with their tables.
        aliases: for each (model, alias), the answers of the processes that have it: the version, the canary version (0:
            none) and the canary's share.
    """

    slot_owner: NDArray[np.uint16]
    route_epoch: int
    endpoints: tuple[tuple[tuple[str, int], ...], ...]
    versions: dict[str, dict[int, dict[str, TableShape]]]
    aliases: dict[tuple[str, str], tuple[tuple[int, int, float], ...]]

    def alias(self, model: str, name: str, current: int | None) -> tuple[int, int, float]:
        """Returns the version that an alias names, the canary version (0: none) and the canary's share.

        When an alias moves, the processes disagree for a moment. Then the version in use stays as long as all processes
        have it.

        Args:
            model: the name of the model.
            name: the alias, or the number of a version.
            current: the version in use; None: none.

        Raises:
            NotFound: there is no such alias, or not every process has its version yet.
        """
        known = self.versions.get(model, {})
        if is_version(name):
            if int(name) not in known:
                raise NotFound(f"model {model}@{name} is not served; served: {self._served()}")
            return int(name), 0, 0.0
        said = [entry for entry in self.aliases.get((model, name), ()) if entry[0] in known]
        if not said:
            raise NotFound(f"model {model}@{name} is not served by every shard; served: {self._served()}")
        version, canary, share = next(
            (entry for entry in said if len(set(said)) > 1 and entry[0] == current), max(said)
        )
        return (version, canary, share) if canary in known else (version, 0, 0.0)

    def _served(self) -> str:
        named = {model for model, _ in self.aliases}
        unnamed = {model: versions for model, versions in self.versions.items() if model not in named}
        by_number = [(model, str(version)) for model, versions in unnamed.items() for version in versions]
        return ", ".join(f"{model}@{which}" for model, which in sorted([*self.aliases, *by_number])) or "nothing"


def fetch_view(addresses: Sequence[str], *, deadline_sec: float, security: FreshSecurity | None = None) -> ReplicaMap:
    """Asks every process what it serves; processes that do not answer are left out.

    Args:
        addresses: the gRPC address, ``HOST:PORT``, of each process.
        deadline_sec: the deadline of the requests, in seconds; they are sent at once.
        security: the certificates and the token; None: the settings of this process.

    Raises:
        Unavailable: no process answers for some shard. The text names the shard, or has the reason why no process
            answers at all.
        FailedPrecondition: the processes have different numbers of shards or slots.
    """
    replies, failure = describe_all(addresses, deadline_sec, security)
    if not replies:
        raise failure or InvalidArgument("ServingClient.addresses: it is empty; allowed: HOST:PORT, ...")
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
            tuple((reply.data_host, reply.data_port) for reply in sorted(answered, key=lambda reply: reply.replica))
            for answered in by_shard
        ),
        versions=_common_versions(by_shard),
        aliases=_aliases(ready),
    )


def describe_all(
    addresses: Sequence[str], deadline_sec: float, security: FreshSecurity | None = None
) -> tuple[list[pb.DescribeReply], SparserowError | None]:
    """Asks every process at once what it serves.

    Args:
        addresses: the gRPC address, ``HOST:PORT``, of each process.
        deadline_sec: the deadline of the requests, in seconds.
        security: the certificates and the token; None: the settings of this process.

    Returns:
        The replies of those that answer, in order, and the last error of the others; None where all answer.

    Raises:
        InvalidArgument: an address is not of the form HOST:PORT.
    """
    channels = [SecureChannel(_checked(address), security) for address in addresses]
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


def make_keys(
    addresses: Sequence[str], request: pb.MakeKeysRequest, *, deadline_sec: float, security: FreshSecurity | None = None
) -> pb.MakeKeysReply:
    """Asks one process after another for the keys of values, until one answers.

    One that has not loaded the version yet, or no longer has it, is passed over.

    Args:
        addresses: the gRPC address, ``HOST:PORT``, of each process.
        request: the request.
        deadline_sec: the deadline of each process, in seconds.
        security: the certificates and the token; None: the settings of this process.

    Raises:
        InvalidArgument, FailedPrecondition, PermissionDenied: a process refuses the request.
        NotFound, Unavailable, DeadlineExceeded: no process answers.
    """
    failure: SparserowError = InvalidArgument("ServingClient.addresses: it is empty; allowed: HOST:PORT, ...")
    for address in addresses:
        with SecureChannel(_checked(address), security) as channel:
            try:
                reply: pb.MakeKeysReply = pb_grpc.ServingStub(channel).MakeKeys(request, timeout=deadline_sec)
                return reply
            except grpc.RpcError as error:
                failure = error_of_status(error, f"serving process {address}")
        if not isinstance(failure, NotFound | Unavailable | DeadlineExceeded):
            break
    raise failure


def _checked(address: str) -> str:
    parse_address(address, what="ServingClient: address")
    return address


def _common_versions(by_shard: list[list[pb.DescribeReply]]) -> dict[str, dict[int, dict[str, TableShape]]]:
    """Returns the versions that every process has, by model."""
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
