"""Explains one row: where it is, its version, and how training and serving compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _server
from ...proto import changes_pb2 as pb, changes_pb2_grpc as pb_grpc
from ...proto.control import ControlClient
from ...proto.errors import NotFound, not_allowed
from ...proto.grpc_status import error_of_status
from ...proto.security.channels import SecureChannel
from ...proto.security.security import process_security
from ...serving.client.client import ServingClient
from ...serving.client.replica_map import describe_all
from ...serving.client.replica_pool import split_addresses
from ...worker.membership.shard_client import shard_client

_CALL_DEADLINE_SEC = 10.0


@dataclass(frozen=True)
class ExplainedRow:
    """One row in words.

    Attributes:
        training_line, serving_line: the values of the row; the second is None when serving was not asked.
        facts: values by name, in the order in which they are shown.
    """

    training_line: str
    serving_line: str | None
    facts: dict[str, str] = field(default_factory=dict)


def explain_row(
    coordinator: str, table: str, key: int, *, serving: str | None = None, model: str | None = None
) -> ExplainedRow:
    """Explains a row, by asking the training cluster, and the serving processes when they are named.

    Args:
        coordinator: ``HOST:PORT`` of the training cluster's coordinator.
        table: ``NAMESPACE/NAME`` of the table.
        key: the key of the row.
        serving: ``HOST:PORT`` of serving processes, with commas; None asks none.
        model: ``NAME[@ALIAS|@VERSION]``; None stands for the only model served.

    Raises:
        InvalidArgument: ``table`` is not NAMESPACE/NAME.
        NotFound: there is no such table, in training or in serving.
        Unavailable: a server cannot be reached.
    """
    namespace, slash, name = table.partition("/")
    if not namespace or not slash or not name:
        raise not_allowed("table", table, "NAMESPACE/NAME")
    with ControlClient(coordinator) as control:
        view = control.cluster()
        schemas = {schema.name: schema for schema in control.list_tables(namespace)}
    if name not in schemas:
        raise NotFound(
            f"table {table!r}: there is no such table; namespace {namespace!r} has: {', '.join(schemas) or 'none'}"
        )
    schema = schemas[name]
    client = shard_client(view, process_security())
    keys = np.array([key], np.uint64)
    rows, versions, found = client.pull(schema.id, keys, dim=schema.dim, versions=True, found=True)
    assert versions is not None
    assert found is not None
    slot = int(_server.slots_of(schema.id, keys, view.slot_count)[0])
    shard = int(view.slot_owner[slot])
    facts = {
        "key": str(key),
        "slot": f"{slot} of {view.slot_count}",
        "training shard": f"{shard} at {view.shards[shard].host}:{view.shards[shard].port}",
        "stored as": f"{schema.dtype}, dim {schema.dim}, {type(schema.optimizer).__name__}",
        "version in training": _version(int(versions[0])),
        **_facts_of_shard(coordinator, shard, view.cluster_id, schema.id, key),
    }
    training_line = _line(rows[0], bool(found[0]))
    if serving is None:
        return ExplainedRow(training_line, None, facts)
    with ServingClient(serving, model=model) as lookups:
        served = lookups.lookup(name, keys)
        facts["model"] = f"{lookups.model} version {served.version}"
    if not served.answered[0]:
        raise served.errors[0]
    facts["version in serving"] = _version(int(served.versions[0]))
    cluster_id = _cluster_of(serving, lookups.model, served.version)
    if cluster_id is not None and cluster_id != view.cluster_id:
        facts["serving is"] = f"of another cluster, {cluster_id:016x}; training is cluster {view.cluster_id:016x}"
    elif int(served.versions[0]) == int(versions[0]):
        facts["serving is"] = "the same version"
    else:
        facts["serving is"] = "another version: live sync has not sent it yet, or is off"
    facts["largest difference"] = _difference(served.rows[0], rows[0])
    return ExplainedRow(training_line, _line(served.rows[0], bool(served.found[0])), facts)


def _cluster_of(serving: str, model: str, version: int) -> int | None:
    """Returns the id of the cluster that trained a served version; None when no process names it any more."""
    replies, _ = describe_all(split_addresses(serving), _CALL_DEADLINE_SEC)
    ids = (
        int(served.cluster_id)
        for reply in replies
        for served in reply.versions
        if (served.model, served.version) == (model, version)
    )
    return next(ids, None)


def _facts_of_shard(coordinator: str, shard: int, cluster_id: int, table_id: int, key: int) -> dict[str, str]:
    with ControlClient(coordinator) as control:
        entry = next(entry for entry in control.status().shards if entry.shard == shard)
    address = f"{entry.control.host}:{entry.control.port}"
    with SecureChannel(address) as channel:
        stub: Any = pb_grpc.ChangesStub(channel)
        try:
            row = stub.GetRow(
                pb.GetRowRequest(cluster_id=cluster_id, table_id=table_id, key=key), timeout=_CALL_DEADLINE_SEC
            )
        except grpc.RpcError as error:
            raise error_of_status(error, f"shard {shard} at {address}") from None
    if not row.exists:
        return {"tier": "none: the row does not exist, and reads return its initial row"}
    age = f"{row.age_ms / 1000:.1f} s" if row.age_ms >= 0 else "unknown: there is no follower, and no policy by time"
    return {
        "tier": "memory" if row.is_in_memory else "SSD",
        "updates": str(row.update_count),
        "age in training": age,
    }


def _difference(served: NDArray[np.float32], trained: NDArray[np.float32]) -> str:
    if served.shape != trained.shape:
        return f"none: the row has dim {len(served)} in serving and {len(trained)} in training"
    return f"{float(np.abs(served - trained).max()):.3g}"


def _line(row: NDArray[np.float32], found: bool) -> str:
    return " ".join(f"{value:.6g}" for value in row) + ("" if found else "  (default row)")


def _version(version: int) -> str:
    return f"lineage {version >> 48}, sequence {version & (1 << 48) - 1}" if version else "none: the row does not exist"
