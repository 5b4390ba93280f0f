"""The synchronous client of the coordinator for workers, tools and tests, with plain values.

It is thread-safe. Every call has a deadline and raises an error of the taxonomy (proto/errors.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from . import control_pb2 as pb
from .closing import Closing
from .cluster_view import ClusterView
from .coordinators import CoordinatorChannel
from .errors import FailedPrecondition, not_allowed
from .job_terms import GradScaleName, check_terms
from .schema import TableSchema
from .schema_message import message_of_schema, schema_of_message
from .security.fresh_security import FreshSecurity, fresh
from .security.security import Security
from .worker_identity import WorkerIdentity, caller_of

_MAY_BE_REPEATED = frozenset(
    (
        "GetCluster",
        "CreateTable",
        "ListTables",
        "GetSave",
        "KeepRows",
        "GetStatus",
        "LeaseData",
        "LeaseStream",
        "ListFaults",
    )
)


class ControlClient(Closing):
    """A client of the coordinator of one cluster. It has to be closed, or used in a ``with`` statement.

    Args:
        address: ``HOST:PORT``; with several coordinators the addresses of all, with commas.
        deadline_sec: the deadline in seconds of every call that has none of its own.
        security: the certificates and token to use, which follow their files; None stands for those of the process.
        patience_sec: how long a call that may be repeated waits for a coordinator that is away or not ready; with 0 it
            fails at once.
    """

    def __init__(
        self,
        address: str,
        *,
        deadline_sec: float = 10.0,
        security: FreshSecurity | Security | None = None,
        patience_sec: float = 0.0,
    ) -> None:
        if not deadline_sec > 0:
            raise not_allowed("ControlClient.deadline_sec", deadline_sec, "> 0")
        self.address = address
        self._deadline_sec = deadline_sec
        self.identity = fresh(security)
        self.patience_sec = patience_sec
        self._channel = CoordinatorChannel(address, self.identity)

    @property
    def security(self) -> Security:
        """The certificates and token that this client shows to the coordinator, and that its user
        shows to the shards.
        """
        return self.identity.now

    def close(self) -> None:
        """Closes the connection; a later call fails."""
        self._channel.close()

    def cluster(self, *, once_sec: float | None = None) -> ClusterView:
        """Returns the slot map and the addresses of the shards.

        Args:
            once_sec: the deadline of a single attempt, whatever the client's ``patience_sec``; None asks as every call
                does.

        Raises:
            Unavailable: the coordinator cannot be reached, or a shard does not serve yet; the text says which.
        """
        reply = self._call("GetCluster", pb.GetClusterRequest(), once_sec, is_patient=once_sec is None)
        return ClusterView.of_reply(reply)

    def create_table(self, schema: TableSchema) -> TableSchema:
        """Creates a table on every shard, or finds it there.

        Returns:
            The schema with its ``id`` and ``version``.

        Raises:
            FailedPrecondition: the table exists with another schema (the text names the field and both values), or its
                id equals the id of another table.
            ResourceExhausted: the namespace has as many tables as it may have.
            Unavailable: as for :meth:`cluster`.
        """
        reply = self._call("CreateTable", pb.CreateTableRequest(schema=message_of_schema(schema)))
        return schema_of_message(reply.schema)

    def list_tables(self, namespace: str = "") -> tuple[TableSchema, ...]:
        """Returns the schemas of the tables of a namespace, ordered by name; an empty namespace stands for all."""
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
            namespace: the namespace of the tables.
            names: the names of the tables; None removes all tables of the namespace, and the namespace itself.
            dry_run: whether the call removes nothing and only reports what it would remove.
            only_unused: whether the call is refused while a job of the namespace has workers.
            deadline_sec: the deadline of the call, in seconds.

        Raises:
            NotFound: there is no such table or namespace. Nothing is removed.
            FailedPrecondition: with ``only_unused``, a job may use the tables. Nothing is removed.
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
        """Removes the rows that a table's policy no longer keeps, on every shard; a dry run counts them.

        Raises:
            NotFound: there is no such table.
            DeadlineExceeded: the sweep took longer than ``deadline_sec``; the shards continue by themselves.
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
        quorum: int | None = None,
    ) -> WorkerIdentity:
        """Joins a job; returns when all ``world_size`` ranks have joined and every shard knows them.

        Args:
            namespace: the namespace of the job; it is created on first use.
            job: the name of the job; all its workers give the same ``world_size``, ``staleness`` and ``grad_scale``.
            rank: the rank in [0, world_size); gradients are summed in the order of ranks.
            world_size: the number of workers of the job.
            staleness: 0 means synchronous, k bounded by k steps, None asynchronous.
            grad_scale: "mean" scales gradients by 1/N, as DDP does; "sum" does not scale them.
            deadline_sec: how long the call waits for the other ranks, in seconds; None means the client's deadline.
            needs_new_namespace: whether the call is refused when the namespace has tables and the job does not run yet.
            quorum: the number of members of a step, with staleness 0; None means all workers.

        Raises:
            InvalidArgument: a value is out of its range.
            FailedPrecondition: another worker of the job gave another value (the text names the field and both), or
                ``needs_new_namespace`` is set and the namespace has tables (the text names some).
            ResourceExhausted: the namespace has as many jobs, or registers as often, as it may.
            DeadlineExceeded: not all ranks have joined; the text says how many have.
            Fenced: the same rank registered again meanwhile.
        """
        check_terms(rank=rank, world_size=world_size, staleness=staleness, grad_scale=grad_scale)
        request = pb.RegisterWorkerRequest(
            namespace=namespace,
            job=job,
            rank=rank,
            world_size=world_size,
            staleness=staleness,
            grad_scale=grad_scale.upper(),
            host=socket.gethostname(),
            pid=os.getpid(),
            needs_new_namespace=needs_new_namespace,
            quorum=quorum or 0,
        )
        reply = self._call("RegisterWorker", request, deadline_sec)
        if reply.quorum != (quorum or 0):
            raise FailedPrecondition("quorum: this coordinator runs an earlier build, which knows no quorum")
        return WorkerIdentity.of_reply(reply)

    def heartbeat_worker(
        self,
        identity: WorkerIdentity,
        *,
        step: int | None = None,
        busy: bool = False,
        waits: bool = False,
        figures: pb.TrainingFigures | None = None,
    ) -> pb.WorkerHeartbeatReply:
        """Renews the lease of a worker; it has to be called at least every third of ``lease_sec``.

        The deadline of the call is a third of the lease, so that another heartbeat can follow a lost one in time.

        Args:
            identity: the worker.
            step: the worker's step, which ``sparserow status`` shows; None leaves it unchanged.
            busy: whether it is at work on what it does alone, so that the others of its job wait for its steps.
            waits: whether it waits for what another worker of the job does, so that late ones leave it.
            figures: what it says of its training.

        Returns:
            Whether a shard is being restored, how many have been restored, and whether another worker is busy.

        Raises:
            Fenced: the lease has ended or the rank has registered again; the worker must register anew.
        """
        request = pb.WorkerHeartbeatRequest(
            job_id=identity.job_id,
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            step=step,
            proof=identity.proof,
            busy=busy,
            waits=waits,
            figures=figures,
        )
        reply: pb.WorkerHeartbeatReply = self._call("WorkerHeartbeat", request, identity.lease_sec / 3)
        return reply

    def deregister_worker(
        self, identity: WorkerIdentity, *, acknowledged: Sequence[int] = (), deadline_sec: float | None = None
    ) -> None:
        """Leaves the job; the call is harmless when the worker has left already.

        The job's clock no longer waits for this worker; the steps that it has committed count.

        Args:
            identity: the worker.
            acknowledged: how many commits and writes by key each shard has acknowledged; (): it is not known.
            deadline_sec: the deadline in seconds; None means the client's deadline.
        """
        request = pb.DeregisterWorkerRequest(
            job_id=identity.job_id,
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            proof=identity.proof,
            acknowledged=acknowledged,
        )
        self._call("DeregisterWorker", request, deadline_sec)

    def report_fault(
        self, identity: WorkerIdentity, *, message: str, traceback: str, echo: bool, deadline_sec: float
    ) -> None:
        """Reports why this process ends, for ``sparserow status``; the worker stays in its job until it leaves.

        Args:
            identity: the worker, which may have left its job already.
            message: the fault in one line; the coordinator keeps 500 characters.
            traceback: the traceback; the coordinator keeps 16 KiB of its beginning and its end.
            echo: whether the fault is of a kind that the end of another process causes.
            deadline_sec: the deadline of the call, in seconds. With several coordinators, half of it is for finding the
                leader.
        """
        request = pb.ReportFaultRequest(
            caller=caller_of(identity),
            host=socket.gethostname(),
            pid=os.getpid(),
            message=message,
            traceback=traceback,
            echo=echo,
        )
        half = deadline_sec / 2
        self._channel.call("ReportFault", request, deadline_sec=half, election_sec=half)

    def list_faults(self) -> tuple[pb.Fault, ...]:
        """Returns the faults of workers, with tracebacks, of all jobs that the token may see.

        The newest incident comes first; the first fault of an incident comes first in it.
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
        order: int = 0,
    ) -> pb.LeaseDataReply:
        """Reports which chunks of an epoch are done, and leases another chunk.

        Args:
            identity: a worker of the job.
            run: the id of the run; a new run of the job begins at its first epoch.
            epoch: the number of the epoch, from 1.
            epochs: the number of epochs of the run.
            chunks: the number of chunks of an epoch, the same for all workers.
            done: the chunks that were finished since the last call; all their commits are acknowledged.
            step: the step of the worker's next commit.
            trained: the sums of what the worker trained on in ``done``; None when the worker does not report them.
            tested: the evaluation of an epoch that is over; None when this worker has not evaluated it.
            again: whether a scheduler started the worker again; then a run that is over stays over.
            order: the digest of the order of the epoch's samples; 0: none.

        Raises:
            Fenced: the worker has left its job; its chunks go to other workers.
            FailedPrecondition: another worker counts other chunks, or has another order.
        """
        request = pb.LeaseDataRequest(
            caller=caller_of(identity),
            run=run,
            epoch=epoch,
            epochs=epochs,
            chunks=chunks,
            done=done,
            step=step,
            trained=trained,
            tested=tested,
            again=again,
            order=order,
        )
        reply: pb.LeaseDataReply = self._call("LeaseData", request)
        return reply

    def lease_stream(
        self,
        identity: WorkerIdentity,
        *,
        run: str,
        source: str,
        settled: int,
        planned: Sequence[pb.PlannedBatch] = (),
        found: Sequence[pb.FoundPart] = (),
        given_back: Sequence[str] = (),
        most: int,
        lags: Mapping[str, int],
        idle: Sequence[str] = (),
    ) -> pb.LeaseStreamReply:
        """Announces the batches that a worker is about to commit, and leases parts of a stream to it.

        Args:
            identity: a worker of the job.
            run: the id of the run, which says where parts end.
            source: a text that describes what is read, the same for all workers.
            settled: the step of the worker's last commit that is known to be applied; -1: there is none.
            planned: the batches that follow, at consecutive steps; they replace those from the same step on.
            found: the parts that the source has; none are forgotten that are left out.
            given_back: parts that the worker reads no further.
            most: how many parts it reads at once.
            lags: how many events of each of its parts are not read yet.
            idle: those of its parts that have had no event for a while.

        Raises:
            Fenced: the worker has left its job; its parts go to other workers.
            FailedPrecondition: another worker reads another source, or a part is not this worker's.
            InvalidArgument: there are too many parts, or a number is out of range.
        """
        request = pb.LeaseStreamRequest(
            caller=caller_of(identity),
            run=run,
            source=source,
            settled=settled,
            planned=planned,
            found=found,
            given_back=given_back,
            most=most,
            lags=[pb.PartNumber(part=part, number=lag) for part, lag in lags.items()],
            idle=idle,
        )
        reply: pb.LeaseStreamReply = self._call("LeaseStream", request)
        return reply

    def begin_save(
        self, url: str, identity: WorkerIdentity | None, *, attempt: int = 0, deadline_sec: float
    ) -> pb.BeginSaveReply:
        """Makes the folder of a checkpoint in ``url``, or finds the one that the job's other workers have begun.

        Args:
            url: a URL of fsspec that means the same to the coordinator and the shards.
            identity: the worker that saves; None saves rows alone.
            attempt: which save of the worker's job this is, from 1; 0 without a worker.
            deadline_sec: the deadline in seconds, including the wait for a save that is under way.

        Returns:
            The name of the checkpoint; or why this attempt ended without the worker, with the number of the newest.

        Raises:
            InvalidArgument, FailedPrecondition, ResourceExhausted: the folder cannot be made.
        """
        request = pb.BeginSaveRequest(url=url, caller=caller_of(identity, attempt))
        reply: pb.BeginSaveReply = self._call("BeginSave", request, deadline_sec)
        return reply

    def enter_save(self, request: pb.EnterSaveRequest, identity: WorkerIdentity | None, *, deadline_sec: float) -> int:
        """Takes part in a save, and returns once the cut is made.

        Returns:
            The last step in the cut; -1 when there is none.

        Raises:
            SparserowError: the save failed, here or in another worker. Older checkpoints are unchanged.
        """
        request.caller.CopyFrom(caller_of(identity))
        return int(self._call("EnterSave", request, deadline_sec).step)

    def get_save(self, url: str, name: str, *, wait_sec: float = 0.0) -> pb.GetSaveReply:
        """Returns the state of a save; waits up to ``wait_sec`` seconds for its end.

        Raises:
            NotFound: the coordinator does not know the save, or no longer.
        """
        request = pb.GetSaveRequest(url=url, name=name, wait_ms=round(wait_sec * 1000))
        reply: pb.GetSaveReply = self._call("GetSave", request, wait_sec + self._deadline_sec)
        return reply

    def keep_rows(self, url: str, identity: WorkerIdentity, *, every_sec: float, config_json: str = "") -> None:
        """Saves rows to ``url`` periodically as long as the caller's job runs; any worker of the job may ask for it.

        Args:
            url: the folder of the saves, as the coordinator and the shards see it.
            identity: a worker of the job.
            every_sec: the time between two saves, in seconds.
            config_json: the configuration of the job, which the saves keep.

        Raises:
            InvalidArgument: the scheme of the URL is unknown, or ``every_sec`` is out of range.
        """
        request = pb.KeepRowsRequest(url=url, caller=caller_of(identity), every_sec=every_sec, config_json=config_json)
        self._call("KeepRows", request)

    def restore(
        self, request: pb.RestoreRequest, identity: WorkerIdentity | None, *, attempt: int = 0, deadline_sec: float
    ) -> pb.RestoreReply:
        """Restores a checkpoint on all shards; every worker of the job calls it.

        Args:
            request: what is restored.
            identity: the worker; None restores without a job.
            attempt: which restore of the worker's job this is, from 1; 0 without a worker.
            deadline_sec: the deadline in seconds.

        Raises:
            SparserowError: the restore failed; the rows then belong to no checkpoint.
        """
        request.caller.CopyFrom(caller_of(identity, attempt))
        reply: pb.RestoreReply = self._call("Restore", request, deadline_sec)
        return reply

    def status(self) -> pb.GetStatusReply:
        """Returns the state of the cluster that ``sparserow status`` shows, also while shards are missing."""
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
