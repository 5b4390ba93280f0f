"""Reads the status of a cluster twice, for the rates and times between."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from ...proto import control_pb2 as pb
from ...proto.control import ControlClient
from ...proto.errors import NotFound
from ...proto.status.cluster_status import ClusterStatus, view_of
from ...proto.status.namespaces import of_namespaces


def of_namespace(reply: pb.GetStatusReply, namespace: str | None) -> pb.GetStatusReply:
    """Returns the status of one namespace: its tables, jobs, faults and keys; None returns the whole status.

    Raises:
        NotFound: the cluster has nothing of that namespace; the text names the existing ones.
    """
    if namespace is None:
        return reply
    lists: tuple[Any, ...] = (reply.tables, reply.jobs, reply.faults)
    known = {each.namespace for each in itertools.chain(*lists)}
    if namespace not in known:
        named = ", ".join(sorted(known)) or "none"
        raise NotFound(f"--namespace {namespace!r}: the cluster has no table, job or fault of it; namespaces: {named}")
    return of_namespaces(reply, (namespace,))


def look(
    client: ControlClient,
    over_sec: float,
    sleep: Callable[[float], object] = time.sleep,
    *,
    namespace: str | None = None,
) -> tuple[pb.GetStatusReply, ClusterStatus]:
    """Reads the status once, or twice with ``over_sec`` seconds between the readings.

    Args:
        client: the client of the coordinator.
        over_sec: the seconds between the readings; 0 reads once.
        sleep: waits for so many seconds.
        namespace: the namespace to show; None shows all.

    Returns:
        The last status and its figures.

    Raises:
        NotFound: the cluster has nothing of that namespace.
        SparserowError: the coordinator cannot be reached.
    """
    first, began = of_namespace(client.status(), namespace), time.monotonic()
    if over_sec <= 0:
        return first, view_of(None, first, 0.0)
    sleep(over_sec)
    second = of_namespace(client.status(), namespace)
    return second, view_of(first, second, time.monotonic() - began)
