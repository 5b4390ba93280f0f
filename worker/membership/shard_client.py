"""Makes the native client of a cluster's shards from the coordinator's description of the cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...cpp_ext import _client
from ...proto.cluster_view import ClusterView
from ...proto.security.security import Security
from ...proto.worker_identity import WorkerIdentity


def shard_client(
    view: ClusterView, security: Security, identity: WorkerIdentity | None = None, **options: Any
) -> _client.Client:
    """Connects to every shard.

    Args:
        view: the coordinator's description of the cluster.
        security: the certificates and the token for the connections.
        identity: the worker's ids in the cluster; None: a client that only reads, outside of steps.
        options: further options of ``_client.Client``, such as ``wire_dtype`` and ``replay_bytes``.

    Raises:
        Unavailable: a shard cannot be reached; the text names it.
        FailedPrecondition: a shard is of another cluster.
        PermissionDenied: a shard refuses the token.
    """
    if identity is not None:
        options.update(
            namespace_id=identity.namespace_id,
            job_id=identity.job_id,
            worker_id=identity.worker_id,
            worker_epoch=identity.epoch,
            worker_proof=identity.proof,
        )
    return _client.Client(
        shards=[(shard.host, shard.port) for shard in view.shards],
        slot_owner=np.ascontiguousarray(view.slot_owner, dtype=np.uint16),
        route_epoch=view.route_epoch,
        cluster_id=view.cluster_id,
        **security.native_client(),
        **options,
    )
