"""The identity of a worker within its job, as the coordinator gave it, and as messages name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from . import control_pb2 as pb


@dataclass(frozen=True)
class WorkerIdentity:
    """The identity of a worker within its job.

    Attributes:
        job_id, namespace_id: 32-bit ids, as in the frames of the data plane.
        worker_id: the id of (job, rank), which stays the same for the life of the cluster.
        epoch: rises when the same rank registers again; requests with an older epoch are refused as Fenced.
        lease_sec: the worker leaves its job when it has not called ``heartbeat_worker`` for so many seconds.
        first_step: the step that the worker begins with.
        proof: 16 bytes that this worker alone knows and shows with its calls; b"" from a coordinator that gives none.
        found: the rows of each table of the namespace, by table name, when the job's generation began. The number is
            None where a shard could not be asked. At most 1,000 tables are listed, and none for a worker that joins a
            running job. The whole is None from a coordinator of the previous version, which does not count them.
        generation: the number of the job's clock, as it was when the worker joined.
        saves_begun, restores_begun: the newest attempts of the job to save and to restore, when the worker joined.
    """

    job_id: int
    worker_id: int
    epoch: int
    lease_sec: float
    first_step: int
    namespace_id: int
    proof: bytes = field(default=b"", repr=False)
    found: Mapping[str, int | None] | None = field(default=None, repr=False)
    saves_begun: int = 0
    restores_begun: int = 0
    generation: int = 0

    @staticmethod
    def of_reply(reply: pb.RegisterWorkerReply) -> WorkerIdentity:
        """Returns the identity that the coordinator's reply has."""
        return WorkerIdentity(
            job_id=reply.job_id,
            worker_id=reply.worker_id,
            epoch=reply.epoch,
            lease_sec=reply.lease_sec,
            first_step=reply.first_step,
            namespace_id=reply.namespace_id,
            proof=reply.proof,
            found={table.name: table.rows if table.HasField("rows") else None for table in reply.found}
            if reply.HasField("found_count")
            else None,
            saves_begun=reply.saves_begun,
            restores_begun=reply.restores_begun,
            generation=reply.generation,
        )


def caller_of(identity: WorkerIdentity | None, attempt: int = 0) -> pb.CheckpointCaller:
    """Returns the worker in the form that messages have; an empty message for None.

    Args:
        identity: the worker.
        attempt: which save or restore of its job this is, from 1; 0 in messages that have none.
    """
    if identity is None:
        return pb.CheckpointCaller()
    return pb.CheckpointCaller(
        job_id=identity.job_id,
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        proof=identity.proof,
        attempt=attempt,
    )
