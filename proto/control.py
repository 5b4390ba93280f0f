"""What a worker, a tool or a test asks of the coordinator: a synchronous client with plain values.

Thread-safe. Every call has a deadline and raises an error of the taxonomy (proto/errors.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import control_pb2 as pb
from .closing import Closing
from .coordinators import CoordinatorChannel
from .errors import InvalidArgument, not_allowed
from .route import owners_of_runs
from .schema import TableSchema
from .schema_message import message_of_schema, schema_of_message
from .security.security import Security, process_security

GradScaleName = Literal["mean", "sum"]
GRAD_SCALES: tuple[GradScaleName, ...] = ("mean", "sum")  # in the order of the message's enum


_MAY_BE_REPEATED = frozenset(
    ("GetCluster", "CreateTable", "ListTables", "GetSave", "KeepRows", "GetStatus", "LeaseData", "ListFaults")
)


@dataclass(frozen=True)
class ShardAddress:
    """Where the data plane of a shard listens."""

    index: int
    host: str
    port: int


@dataclass(frozen=True)
class ClusterView:
    """A cluster as a client needs it.

    Attributes:
        cluster_id: random 64-bit number given at creation; checked when a client says HELLO to a shard.
        slot_count: power of two.
        route_epoch: raised whenever a slot changes its owner.
        slot_owner: (slot_count) uint16, shard index of each slot.
        shards: in the order of their indexes.
    """

    cluster_id: int
    slot_count: int
    route_epoch: int
    slot_owner: NDArray[np.uint16]
    shards: tuple[ShardAddress, ...]


@dataclass(frozen=True)
class WorkerIdentity:
    """The identity of a worker within its job.

    Attributes:
        job_id, namespace_id: 32-bit, as in the frames of the data plane.
        worker_id: kept by (job, rank) for the cluster's life.
        epoch: raised when the same rank registers again; an older epoch is refused as Fenced.
        lease_sec: the worker leaves its job when it has not called ``heartbeat_worker`` for so long.
        first_step: the step to begin with.
        proof: 16 bytes that this worker alone knows, shown with its calls; b"" from a coordinator that gives none.
        found: of the namespace, when the job's generation began: rows of each table by name, None where a shard could
            not be asked; 1,000 tables at most, and none for a worker that joins a running job.
            None: a coordinator of the version before does not look.
    """

    job_id: int
    worker_id: int
    epoch: int
    lease_sec: float
    first_step: int
    namespace_id: int
    proof: bytes = field(default=b"", repr=False)
    found: Mapping[str, int | None] | None = field(default=None, repr=False)


class ControlClient(Closing):
    """A connection to one coordinator. Close it, or use it in a ``with`` statement.

    Args:
        address: ``HOST:PORT``; of several coordinators of which one leads, all of them with commas.
        deadline_sec: of every call that does not name its own.
        security: None: the process's.
        patience_sec: for so long calls that may be made twice wait for a coordinator that is away or not ready; by
            default they fail at once.
    """

    def __init__(
        self,
        address: str,
        *,
        deadline_sec: float = 10.0,
        security: Security | None = None,
        patience_sec: float = 0.0,
    ) -> None:
        if not deadline_sec > 0:
            raise not_allowed("ControlClient.deadline_sec", deadline_sec, "> 0")
        self.address = address
        self._deadline_sec = deadline_sec
        self._security = security
        self.patience_sec = patience_sec
        self._channel = CoordinatorChannel(address, security)

    @property
    def security(self) -> Security:
        """What is shown to the coordinator, and to be shown to its shards."""
        return process_security() if self._security is None else self._security

    def close(self) -> None:
        """Closes the connection; a later call fails."""
        self._channel.close()

    def cluster(self, *, once_sec: float | None = None) -> ClusterView:
        """The slot map and the shards' addresses.

        Args:
            once_sec: asks once, for so long, whatever the client's patience; None: as every call.

        Raises:
            Unavailable: the coordinator cannot be reached, or not every shard serves yet (the text says which).
        """
        reply = self._call("GetCluster", pb.GetClusterRequest(), once_sec, is_patient=once_sec is None)
        return ClusterView(
            cluster_id=reply.cluster_id,
            slot_count=reply.route.slot_count,
            route_epoch=reply.route.epoch,
            slot_owner=owners_of_runs([(run.start, run.shard) for run in reply.route.runs], reply.route.slot_count),
            shards=tuple(ShardAddress(s.shard, s.data.host, s.data.port) for s in reply.shards),
        )

    def create_table(self, schema: TableSchema) -> TableSchema:
        """Creates a table on every shard, or finds it there; returns the schema with ``id`` and ``version``.

        Raises:
            FailedPrecondition: the table exists with another schema (names the field and both values), or its id
                collides with another table's.
            Unavailable: as :meth:`cluster`.
        """
        reply = self._call("CreateTable", pb.CreateTableRequest(schema=message_of_schema(schema)))
        return schema_of_message(reply.schema)

    def list_tables(self, namespace: str = "") -> tuple[TableSchema, ...]:
        """The tables of a namespace (empty: of all), by name."""
        reply = self._call("ListTables", pb.ListTablesRequest(namespace=namespace))
        return tuple(schema_of_message(message) for message in reply.schemas)

    def drop_table(self, namespace: str, name: str) -> None:
        """Removes a table and its rows from every shard.

        Raises:
            NotFound: there is no such table.
        """
        self._call("DropTable", pb.DropTableRequest(namespace=namespace, name=name))

    def drop_tables(
        self,
        namespace: str,
        names: Sequence[str] | None,
        *,
        dry_run: bool = False,
        only_unused: bool = False,
        deadline_sec: float = 600.0,
    ) -> pb.DropTablesReply:
        """Removes tables and their rows from every shard.

        Args:
            namespace: of the tables.
            names: of the tables; None: all of the namespace, which is forgotten with them.
            dry_run: removes nothing, and says what would go.
            only_unused: refuses while a job of the namespace has workers.
            deadline_sec: of the call.

        Raises:
            NotFound: there is no such table or namespace. Nothing is removed.
            FailedPrecondition: a job may use them, with ``only_unused``.
        """
        request = pb.DropTablesRequest(
            namespace=namespace,
            names=names or (),
            whole_namespace=names is None,
            dry_run=dry_run,
            only_unused=only_unused,
        )
        reply: pb.DropTablesReply = self._call("DropTables", request, deadline_sec)
        return reply

    def sweep_table(
        self, namespace: str, name: str, *, dry_run: bool = False, deadline_sec: float = 3600.0
    ) -> pb.SweepTableReply:
        """Removes the rows that a table's policy no longer wants, on every shard; in a dry run counts them.

        Raises:
            NotFound: there is no such table.
            DeadlineExceeded: not done in time; shards go on by themselves.
        """
        request = pb.SweepTableRequest(namespace=namespace, name=name, dry_run=dry_run)
        reply: pb.SweepTableReply = self._call("SweepTable", request, deadline_sec)
        return reply

    def register_worker(
        self,
        *,
        namespace: str,
        job: str,
        rank: int,
        world_size: int,
        staleness: int | None = 0,
        grad_scale: GradScaleName = "mean",
        deadline_sec: float | None = None,
        needs_new_namespace: bool = False,
    ) -> WorkerIdentity:
        """Joins a job; returns when all ``world_size`` ranks have come and every shard knows them.

        Args:
            namespace: of the job; created on first use.
            job: its name; all its workers give the same ``world_size``, ``staleness`` and ``grad_scale``.
            rank: [0, world_size): the order in which gradients are summed.
            staleness: 0 synchronous, k bounded, None async.
            grad_scale: "mean" scales gradients by 1/N, as DDP does; "sum" does not.
            deadline_sec: how long to wait for the other ranks; None is the client's own.
            needs_new_namespace: whether to be refused when the namespace has tables and the job does not run yet.

        Raises:
            FailedPrecondition: another worker of the job gave another value (names the field and both), or the
                namespace has tables (names some) that ``needs_new_namespace`` refuses.
            DeadlineExceeded: says how many of how many ranks have come.
            Fenced: the same rank registered again meanwhile.
        """
        if not 0 <= rank < world_size < 2**31 or (staleness is not None and not 0 <= staleness < 2**31):
            raise InvalidArgument(
                f"register_worker: rank {rank}, world_size {world_size}, staleness {staleness}; "
                "allowed: 0 <= rank < world_size, staleness >= 0 or None"
            )
        if grad_scale not in GRAD_SCALES:
            raise not_allowed("grad_scale", grad_scale, GRAD_SCALES)
        request = pb.RegisterWorkerRequest(
            namespace=namespace,
            job=job,
            rank=rank,
            world_size=world_size,
            staleness=staleness,
            grad_scale=grad_scale.upper(),
            host=socket.gethostname(),
            pid=os.getpid(),
            proves=True,
            needs_new_namespace=needs_new_namespace,
        )
        reply = self._call("RegisterWorker", request, deadline_sec)
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
        )

    def heartbeat_worker(self, identity: WorkerIdentity, *, step: int | None = None) -> pb.WorkerHeartbeatReply:
        """Renews the lease; call it at least every third of ``lease_sec``. ``step`` is shown by ``sparserow status``.

        It has a third of the lease to be answered, so that one that is lost is followed by another in time.

        Returns:
            Whether a shard is being restored, and how many were.

        Raises:
            Fenced: the lease has ended or the rank has registered again; the worker must register anew.
        """
        request = pb.WorkerHeartbeatRequest(
            job_id=identity.job_id,
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            step=step,
            proof=identity.proof,
        )
        reply: pb.WorkerHeartbeatReply = self._call("WorkerHeartbeat", request, identity.lease_sec / 3)
        return reply

    def deregister_worker(self, identity: WorkerIdentity, *, deadline_sec: float | None = None) -> None:
        """Leaves the job; harmless when it has left already.

        The clock waits for this worker no longer; what it has committed counts. ``deadline_sec``: None is the client's.
        """
        request = pb.DeregisterWorkerRequest(
            job_id=identity.job_id, worker_id=identity.worker_id, epoch=identity.epoch, proof=identity.proof
        )
        self._call("DeregisterWorker", request, deadline_sec)

    def report_fault(
        self, identity: WorkerIdentity, *, message: str, traceback: str, echo: bool, deadline_sec: float
    ) -> None:
        """Says why this process ends, for ``sparserow status``; the worker stays in its job until it leaves.

        Args:
            identity: of the worker, which need not be in its job any more.
            message: one line; the coordinator keeps 500 characters.
            traceback: of it 16 KiB are kept, of its beginning and its end.
            echo: it is of a kind that the end of another process causes.
            deadline_sec: of the call; in half of it, of several coordinators, the one that leads is found or not.
        """
        request = pb.ReportFaultRequest(
            caller=_caller(identity),
            host=socket.gethostname(),
            pid=os.getpid(),
            message=message,
            traceback=traceback,
            echo=echo,
        )
        half = deadline_sec / 2
        self._channel.call("ReportFault", request, deadline_sec=half, election_sec=half)

    def list_faults(self) -> tuple[pb.Fault, ...]:
        """Of workers of all jobs that the token reaches, with tracebacks: the newest incident first, in it the first
        fault.
        """
        return tuple(self._call("ListFaults", pb.ListFaultsRequest()).faults)

    def lease_data(
        self,
        identity: WorkerIdentity,
        *,
        run: str,
        epoch: int,
        epochs: int,
        chunks: int,
        done: Sequence[int],
        step: int,
        trained: pb.EpochSums | None = None,
        tested: pb.EpochTest | None = None,
        again: bool = False,
    ) -> pb.LeaseDataReply:
        """Says which chunks of an epoch are done, and leases another one.

        Args:
            identity: of a worker of the job.
            run: a new run of the job begins at its first epoch.
            epoch: from 1.
            epochs: that the run has.
            chunks: that an epoch has; the same for all workers.
            done: since the last call; all their commits are acknowledged.
            step: of the worker's next commit.
            trained: what the worker did in ``done``; None: it does not tell.
            tested: of an epoch that is over; None: this worker has not evaluated it.
            again: a scheduler started the worker again, so a run that is over stays over.

        Raises:
            Fenced: the worker has left its job; its chunks go to others.
            FailedPrecondition: another worker counts other chunks.
        """
        request = pb.LeaseDataRequest(
            caller=_caller(identity),
            run=run,
            epoch=epoch,
            epochs=epochs,
            chunks=chunks,
            done=done,
            step=step,
            trained=trained,
            tested=tested,
            again=again,
        )
        reply: pb.LeaseDataReply = self._call("LeaseData", request)
        return reply

    def begin_save(self, url: str, identity: WorkerIdentity | None, *, deadline_sec: float) -> str:
        """Makes the folder of a checkpoint in ``url``, or finds the one that the job's other workers have begun.

        Args:
            url: of fsspec, as the coordinator and the shards see it.
            identity: of the worker that saves; None: rows are saved alone.
            deadline_sec: waiting for a save that is under way included.

        Returns:
            The checkpoint's name.

        Raises:
            InvalidArgument, FailedPrecondition, ResourceExhausted: the folder cannot be made.
        """
        request = pb.BeginSaveRequest(url=url, caller=_caller(identity))
        return str(self._call("BeginSave", request, deadline_sec).name)

    def enter_save(self, request: pb.EnterSaveRequest, identity: WorkerIdentity | None, *, deadline_sec: float) -> int:
        """Takes part in a save; returns the last step in it (-1: none) once the cut is made.

        Raises:
            SparserowError: why it failed, here or with another worker; older checkpoints are as they were.
        """
        request.caller.CopyFrom(_caller(identity))
        return int(self._call("EnterSave", request, deadline_sec).step)

    def get_save(self, url: str, name: str, *, wait_sec: float = 0.0) -> pb.GetSaveReply:
        """How far a save is; waits up to ``wait_sec`` for its end.

        Raises:
            NotFound: the coordinator does not know it (any more).
        """
        request = pb.GetSaveRequest(url=url, name=name, wait_ms=round(wait_sec * 1000))
        reply: pb.GetSaveReply = self._call("GetSave", request, wait_sec + self._deadline_sec)
        return reply

    def keep_rows(self, url: str, identity: WorkerIdentity, *, every_sec: float, config_json: str = "") -> None:
        """Has rows saved to ``url`` over and over as long as the caller's job goes on; any of its workers may ask.

        Raises:
            InvalidArgument: an unknown URL scheme, or ``every_sec`` out of range.
        """
        request = pb.KeepRowsRequest(url=url, caller=_caller(identity), every_sec=every_sec, config_json=config_json)
        self._call("KeepRows", request)

    def restore(
        self, request: pb.RestoreRequest, identity: WorkerIdentity | None, *, deadline_sec: float
    ) -> pb.RestoreReply:
        """Puts all shards back to a checkpoint; every worker of the job calls it.

        Raises:
            SparserowError: why it failed; the rows are then those of no checkpoint.
        """
        request.caller.CopyFrom(_caller(identity))
        reply: pb.RestoreReply = self._call("Restore", request, deadline_sec)
        return reply

    def status(self) -> pb.GetStatusReply:
        """What is behind ``sparserow status``; answers also while shards are missing."""
        reply: pb.GetStatusReply = self._call("GetStatus", pb.GetStatusRequest())
        return reply

    def _call(self, method: str, request: Any, deadline_sec: float | None = None, *, is_patient: bool = True) -> Any:
        return self._channel.call(
            method,
            request,
            deadline_sec=deadline_sec or self._deadline_sec,
            may_repeat=method in _MAY_BE_REPEATED,
            patience_sec=self.patience_sec if is_patient else 0.0,
        )


def _caller(identity: WorkerIdentity | None) -> pb.CheckpointCaller:
    if identity is None:
        return pb.CheckpointCaller()
    return pb.CheckpointCaller(
        job_id=identity.job_id, worker_id=identity.worker_id, epoch=identity.epoch, proof=identity.proof
    )
