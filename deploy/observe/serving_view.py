"""Serving processes in figures, for ``sparserow status --serving``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from ...proto import serving_pb2 as pb, serving_pb2_grpc as pb_grpc
from ...proto.coordinators import parse_address
from ...proto.errors import SparserowError
from ...proto.grpc_status import error_of_status
from ...proto.security.channels import SecureChannel
from ...proto.status.figures import quantile


@dataclass(frozen=True)
class ServedReplica:
    """A version of a model in a serving process, or what keeps the process from serving as it should.

    Attributes:
        model, version, rows: the version and the number of its rows; "-" and zeros in the second case.
        behind_sec: the seconds since it last had all changes of training; None when it does not follow.
        fresh_p50_sec, fresh_p99_sec: quantiles of the age at which changes became visible in the process, since its
            start; None when there was no change.
        problem: why the process cannot be asked, is not ready or does not follow; empty when all is well.
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
    """Returns what each process serves; a process that cannot be asked is listed with its problem.

    Args:
        addresses: ``HOST:PORT`` of each process's gRPC server.
        deadline_sec: the deadline of each call, in seconds.

    Raises:
        InvalidArgument: an address is not of the form HOST:PORT.
    """
    views: list[ServedReplica] = []
    for address in addresses:
        parse_address(address, what="--serving")
        channel = SecureChannel(address)
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
        views += [ServedReplica(address, "-", 0, 0, None, None, None, problem) for problem in reply.problems]
    return views
