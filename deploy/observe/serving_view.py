"""Serving processes in figures: what ``sparserow status --serving`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from ...proto import serving_pb2 as pb, serving_pb2_grpc as pb_grpc
from ...proto.coordinators import parse_address
from ...proto.errors import SparserowError
from ...proto.grpc_status import error_of_status
from ...proto.security.security import open_channel
from .cluster_status import quantile


@dataclass(frozen=True)
class ServedReplica:
    """A version in a serving process.

    Attributes:
        behind_sec: since it last had everything of training; None: it does not follow.
        fresh_p50_sec, fresh_p99_sec: of the process: age of changes when they became visible, since its start; None:
            there was none.
        problem: why it cannot be asked, is not ready or does not follow; empty when all is well.
    """

    address: str
    model: str
    version: int
    rows: int
    behind_sec: float | None
    fresh_p50_sec: float | None
    fresh_p99_sec: float | None
    problem: str


def describe_serving(addresses: Sequence[str], *, deadline_sec: float = 5.0) -> list[ServedReplica]:
    """What each process serves; one that cannot be asked is a view with its problem.

    Raises:
        InvalidArgument: an address is none.
    """
    views: list[ServedReplica] = []
    for address in addresses:
        parse_address(address, what="--serving")
        channel = open_channel(address, None)
        try:
            stub: Any = pb_grpc.ServingStub(channel)
            reply = stub.Describe(pb.DescribeRequest(), timeout=deadline_sec)
        except grpc.RpcError as error:
            failure: SparserowError = error_of_status(
                error, f"serving process {address}", remedy="; start it with `sparserow serve`"
            )
            views.append(ServedReplica(address, "-", 0, 0, None, None, None, str(failure)))
            continue
        finally:
            channel.close()
        bounds = [bucket.at_most_sec for bucket in reply.freshness]
        counts = [bucket.slots for bucket in reply.freshness]
        for version in reply.versions:
            views.append(
                ServedReplica(
                    address,
                    version.model,
                    version.version,
                    sum(table.rows for table in version.tables),
                    version.behind_sec if version.follows else None,
                    quantile(bounds[:-1], counts, 0.5),
                    quantile(bounds[:-1], counts, 0.99),
                    version.problem or ("" if version.ready else "not every slot is complete"),
                )
            )
    return views
