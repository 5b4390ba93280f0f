"""The Coordinator service: each method checks its request, changes and saves the cluster, informs the shards, and
answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from ...proto import control_pb2 as pb
from ...proto.errors import FailedPrecondition, Fenced, InvalidArgument
from ...proto.process.access import caller_namespaces, caller_reaches, check_caller
from ...proto.schema_message import message_of_schema
from ...proto.status.namespaces import visible_to
from .lease_messages import lease_reply, lease_request_of, stream_reply, stream_request_of
from .procedures.checkpoint_restore import CheckpointRestores
from .procedures.checkpoint_save import CheckpointSaves
from .procedures.damage_notes import DamageNotes
from .procedures.membership_change import JobOperations
from .procedures.periodic_save import PeriodicSaves
from .procedures.shard_calls import ShardCalls
from .procedures.shard_recovery import ShardRecoveries
from .procedures.tables import Tables
from .procedures.worker_registration import WorkerRegistrations
from .state.cluster import Cluster
from .state.data_leases import WorkerKey
from .state.faults import Process
from .state.membership import Job, Ticket
from .state.shards import PlaceNotFree, Shard
from .status import fault_message, status_message

log = logging.getLogger(__name__)


class CoordinatorService:
    """Answers all clients of one cluster. It belongs to one event loop.

    Args:
        cluster: the state of the cluster; only this class and its procedures change it.
        shard_calls: the connections to the shards.
        save: saves the cluster, where it is saved; it raises before anything is sent to a shard.
        clock: returns monotonic time in seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        shard_calls: ShardCalls,
        *,
        save: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._shard_calls = shard_calls
        self._save = save
        self._operations = JobOperations(cluster, shard_calls, save)
        self._clock = clock
        self._tables = Tables(cluster, shard_calls, save, self._wait_for_end)
        self._registrations = WorkerRegistrations(
            cluster, shard_calls, self._operations, save=save, clock=clock, begin=self._begin, wait_for=self._wait_for
        )
        self._saves = CheckpointSaves(cluster, shard_calls, self._operations, save, self._wait_for)
        self._restores = CheckpointRestores(
            cluster, shard_calls, self._operations, save, self._tables.lock, self._wait_for
        )
        self.recoveries = ShardRecoveries(cluster, shard_calls, self._tables.lock, save)
        self._damage_notes = DamageNotes(cluster)
        self._row_saves = PeriodicSaves(cluster, self._saves, save)
        self._tasks: set[asyncio.Task[None]] = set()
        self._catch_ups: dict[int, asyncio.Task[None]] = {}  # by the instance of the shard

    def go_on(self) -> None:
        """Continues the work that a previous coordinator of this cluster had begun; called within the event loop."""
        self._row_saves.go_on()
        self._restores.go_on()

    async def close(self) -> None:
        """Cancels the work that no request waits for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._tables.close()
        await self._row_saves.close()
        await self.recoveries.close()
        await self._saves.close()
        await self._restores.close()

    # ---- shards

    async def RegisterShard(self, request: pb.RegisterShardRequest, context: Any) -> pb.RegisterShardReply:
        """Assigns a shard to a process."""
        cluster = self._cluster
        if request.cluster_id not in (0, cluster.cluster_id):
            raise FailedPrecondition(
                f"shard {request.shard} holds rows of cluster {request.cluster_id:x} and this coordinator is of "
                f"cluster {cluster.cluster_id:x}; start the coordinator with the --state of the former, or restart "
                "the shard"
            )
        if not request.instance or not request.control.host or not request.control.port:
            raise InvalidArgument("RegisterShard: instance and control address must be set")
        instances = [shard.instance for shard in cluster.shards.shards]
        awaits_restore = cluster.awaits_restore
        try:
            shard = cluster.shards.register(
                request.shard,
                instance=request.instance,
                control=(request.control.host, request.control.port),
                pid=request.pid,
                tables=len(cluster.registry.tables()) if not awaits_restore else 0,
                now=self._clock(),
                problem=self.recoveries.problem(),
                passes=self.recoveries.passes(),
            )
        except PlaceNotFree as error:
            if not request.can_wait:
                raise
            holder = cluster.shards.shards[request.shard]
            pid, renewals = (holder.pid, holder.renewals) if holder.is_live else (0, 0)
            return pb.RegisterShardReply(wait=pb.ShardWait(reason=str(error), holder_pid=pid, holder_renewals=renewals))
        if cluster.damage is not None and awaits_restore and instances[shard.index] not in (0, shard.instance):
            # The tables of the new process are empty, also those that the restore leaves alone.
            cluster.damage.table_ids.update(schema.id for schema in cluster.registry.tables())
            self._begin(self._tables.send_refusal())
        self._save()
        log.info("shard %d registered (process %d, lineage %d)", shard.index, shard.pid, shard.lineage)
        return pb.RegisterShardReply(
            cluster_id=cluster.cluster_id,
            slot_count=cluster.slots.slot_count,
            lineage=shard.lineage,
            lease_sec=cluster.shards.lease_sec,
        )

    async def ShardHeartbeat(self, request: pb.ShardHeartbeatRequest, context: Any) -> pb.ShardHeartbeatReply:
        """Renews a shard's lease; a shard that is behind receives the whole state before this is answered."""
        data = (request.data.host, request.data.port) if request.HasField("data") else None
        shards = self._cluster.shards
        known = shards.place(request.shard)
        shard = shards.heartbeat(
            request.shard, instance=request.instance, data=data, draining=request.draining, now=self._clock()
        )
        if request.leaving:
            shards.leave(shard.index, request.instance)
        newly_lost = self._cluster.note_lost(shard.index, request.lost)
        if newly_lost or shards.place(request.shard) != known:
            self._save()
        if request.leaving:
            log.info("shard %d has left", shard.index)
        elif shard.restoring and shard.data is not None and not shard.draining:
            self.recoveries.begin(shard)
        elif shard.behind and shard.data is not None and not shard.draining:
            # The deadline of a heartbeat may pass before everything is sent; the next heartbeat waits for the same
            # task.
            catch_up = self._catch_ups.get(shard.instance)
            if catch_up is None:
                catch_up = self._catch_ups[shard.instance] = self._begin(self._catch_up(shard, shard.instance))
            await asyncio.shield(catch_up)
        return pb.ShardHeartbeatReply(lease_sec=shards.lease_sec, unix_sec=time.time())

    async def _catch_up(self, shard: Shard, instance: int) -> None:
        try:
            await self._shard_calls.catch_up(shard)
        finally:
            del self._catch_ups[instance]
        log.info("shard %d serves at %s:%d", shard.index, *(shard.data or ("?", 0)))
        if not self._cluster.shards.problem():
            log.info("the cluster is ready: all %d shards serve", len(self._cluster.shards.shards))

    async def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> pb.GetClusterReply:
        """Returns the slot map and the address of every shard's data plane."""
        self._cluster.check_ready()
        addresses = [
            pb.ShardAddress(shard=shard.index, data=pb.Address(host=shard.data[0], port=shard.data[1]))
            for shard in self._cluster.shards.shards
            if shard.data is not None
        ]
        return pb.GetClusterReply(
            cluster_id=self._cluster.cluster_id, route=self._shard_calls.route_message(), shards=addresses
        )

    # ---- tables

    async def CreateTable(self, request: pb.CreateTableRequest, context: Any) -> pb.CreateTableReply:
        """Creates a table on all shards or on none, also when the caller has gone by then; a
        repeated call is harmless.
        """
        return await self._tables.create(request)

    async def ListTables(self, request: pb.ListTablesRequest, context: Any) -> pb.ListTablesReply:
        """Returns the tables of one namespace, or of all."""
        tables = self._cluster.registry.tables(request.namespace)
        return pb.ListTablesReply(schemas=[message_of_schema(schema) for schema in tables])

    async def DropTable(self, request: pb.DropTableRequest, context: Any) -> pb.DropTableReply:
        """Removes a table and its rows from all shards, also when the caller has gone by then."""
        wanted = pb.DropTablesRequest(namespace=request.namespace, names=[request.name])
        await self._tables.drop(wanted, counts=False)
        return pb.DropTableReply()

    async def DropTables(self, request: pb.DropTablesRequest, context: Any) -> pb.DropTablesReply:
        """Removes tables, or a namespace with its tables, also when the caller has gone by then."""
        return await self._tables.drop(request)

    async def SweepTable(self, request: pb.SweepTableRequest, context: Any) -> pb.SweepTableReply:
        """Removes the rows that a table's policy no longer keeps, on all shards at once."""
        self._cluster.check_ready()
        schema = self._cluster.registry.find(request.namespace, request.name)
        reply = await self._shard_calls.sweep(schema.id, dry_run=request.dry_run, deadline_sec=context.time_remaining())
        if not request.dry_run:
            log.info("table %s swept: %d rows removed", schema.full_name, sum(freed.rows for freed in reply.freed))
        return reply

    # ---- workers

    async def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: Any) -> pb.RegisterWorkerReply:
        """Registers a worker; answers when every rank has joined and every shard knows the members."""
        return await self._registrations.register(request, context.time_remaining())

    def _ticket_of(self, caller: Any) -> Ticket:
        """Returns the registration that a message names, after checking that the token of the call reaches its
        namespace.
        """
        ticket = self._cluster.jobs.find(caller.job_id, caller.worker_id, caller.epoch)
        check_caller(self._cluster.jobs.jobs[ticket.job_id].namespace)
        self._cluster.jobs.check_proof(ticket, caller.proof)
        return ticket

    async def WorkerHeartbeat(self, request: pb.WorkerHeartbeatRequest, context: Any) -> pb.WorkerHeartbeatReply:
        """Renews a worker's lease."""
        ticket = self._ticket_of(request)
        step = request.step if request.HasField("step") else None
        self._cluster.jobs.heartbeat(
            ticket, step, self._clock(), busy=request.busy, waits=request.waits, figures=request.figures
        )
        key = ticket.job_id, ticket.worker_id
        self._cluster.faults.heard(key, time.time() + self._cluster.jobs.lease_sec / 3)
        shards, now = self._cluster.shards.shards, self._clock()
        job = self._cluster.jobs.check(ticket)
        is_synchronous = job.terms.staleness == 0
        return pb.WorkerHeartbeatReply(
            lease_sec=self._cluster.jobs.lease_sec,
            restoring=any(shard.is_coming_back(now) for shard in shards) and not self.recoveries.problem(),
            shard_restores=self.recoveries.done,
            shard_processes=self._cluster.shards.processes(),
            over=self._cluster.shards.replaced(now) if is_synchronous else "",
            peer_busy=job.has_busy_peer(ticket, now),
        )

    async def LeaseData(self, request: pb.LeaseDataRequest, context: Any) -> pb.LeaseDataReply:
        """Notes the data that a worker has trained on, and leases more to it."""
        cluster = self._cluster
        job, holder, known = self._reader(request.caller)
        given = cluster.data.answer(job.job_id, job.generation, lease_request_of(request), holder, known)
        if given.chunk is None and not given.is_over:  # others have the last chunks
            self._wait_for({job.job_id})
        if given.chunk is not None or request.done or request.HasField("tested"):
            self._save()
        return lease_reply(given)

    async def LeaseStream(self, request: pb.LeaseStreamRequest, context: Any) -> pb.LeaseStreamReply:
        """Notes the batches that a worker is about to commit, and leases parts of a stream to it."""
        job, holder, known = self._reader(request.caller)
        ranks = sorted(job.members.values(), key=lambda member: member.ticket.rank)
        members = [(member.ticket.worker_id, member.ticket.epoch) for member in ranks]
        given = self._cluster.data.answer_stream(
            job.job_id, job.generation, stream_request_of(request), holder, members, known
        )
        self._save()
        return stream_reply(given)

    def _reader(self, caller: pb.CheckpointCaller) -> tuple[Job, WorkerKey, set[WorkerKey]]:
        """Returns the job and key of a worker that asks for data, and the workers whose leases are theirs."""
        ticket = self._ticket_of(caller)
        job = self._cluster.jobs.check(ticket)
        known = {(member.ticket.worker_id, member.ticket.epoch) for member in job.members.values()}
        roster = self._cluster.rosters[job.job_id]
        known.update(span.key for span in roster.spans.values() if span.until_step is None)
        return job, (ticket.worker_id, ticket.epoch), known

    async def DeregisterWorker(self, request: pb.DeregisterWorkerRequest, context: Any) -> pb.DeregisterWorkerReply:
        """Removes a worker from its job; the call is harmless when it has left already."""
        try:
            full_name, rank = self._cluster.jobs.origin(request.job_id, request.worker_id, request.epoch)
            check_caller(full_name.partition("/")[0])
            self._cluster.jobs.check_proof(
                Ticket(request.job_id, rank, request.worker_id, request.epoch), request.proof
            )
            self._cluster.faults.left((request.job_id, request.worker_id), request.epoch)
            ticket = self._ticket_of(request)
        except Fenced:
            return pb.DeregisterWorkerReply()
        self._cluster.jobs.leave_in_order(ticket)
        roster = self._cluster.rosters.get(ticket.job_id)
        is_known = roster is not None and (ticket.worker_id, ticket.epoch) in roster.spans
        if is_known and len(request.acknowledged) == len(self._cluster.shards.shards):
            key = ticket.job_id, ticket.worker_id, ticket.epoch
            self._cluster.leaving[key] = tuple(request.acknowledged)
        await self._registrations.after_leaving(ticket.job_id)
        return pb.DeregisterWorkerReply()

    async def ReportFault(self, request: pb.ReportFaultRequest, context: Any) -> pb.ReportFaultReply:
        """Notes why a worker ends."""
        who, jobs = request.caller, self._cluster.jobs
        full_name, rank = jobs.origin(who.job_id, who.worker_id, who.epoch)
        check_caller(full_name.partition("/")[0])
        jobs.check_proof(Ticket(who.job_id, rank, who.worker_id, who.epoch), who.proof)
        process, key = Process(rank, who.epoch, request.host, request.pid), (who.job_id, who.worker_id)
        fault = self._cluster.faults.report(
            full_name, key, process, time.time(), request.message, request.traceback, request.echo
        )
        # The level is info, because a job that one command started prints the fault itself.
        log.info("job %s: rank %d on %s has failed: %s", full_name, rank, fault.host, fault.message)
        self._save()
        return pb.ReportFaultReply()

    async def ListFaults(self, request: pb.ListFaultsRequest, context: Any) -> pb.ListFaultsReply:
        """Returns the faults in the namespaces that the caller may see."""
        faults = [fault for fault in self._cluster.faults.listed() if caller_reaches(fault.namespace)]
        return pb.ListFaultsReply(faults=[fault_message(fault) for fault in faults])

    # ---- checkpoints

    async def BeginSave(self, request: pb.BeginSaveRequest, context: Any) -> pb.BeginSaveReply:
        """Makes the folder of a checkpoint, or finds the one that another worker has begun."""
        return await self._saves.begin(request)

    async def EnterSave(self, request: pb.EnterSaveRequest, context: Any) -> pb.EnterSaveReply:
        """Takes part in a save; answers when all workers of the job have entered and the cut is made."""
        return await self._saves.enter(request)

    async def GetSave(self, request: pb.GetSaveRequest, context: Any) -> pb.GetSaveReply:
        """Returns the progress of a save."""
        return await self._saves.state(request)

    async def KeepRows(self, request: pb.KeepRowsRequest, context: Any) -> pb.KeepRowsReply:
        """Saves rows periodically while a job runs."""
        await self._row_saves.keep(request)
        return pb.KeepRowsReply()

    async def Restore(self, request: pb.RestoreRequest, context: Any) -> pb.RestoreReply:
        """Restores a checkpoint on all shards."""
        return await self._restores.restore(request)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusReply:
        """Returns everything that ``sparserow status`` shows, of the namespaces that the caller may see."""
        return visible_to(await self.whole_status(), caller_namespaces())

    async def whole_status(self) -> pb.GetStatusReply:
        """Returns the status of all namespaces, for a server that looks itself what its caller may see."""
        damaged, failure = await self._damage_notes.names(), self.recoveries.failure
        return await status_message(
            self._cluster, self._shard_calls, now=self._clock(), failure=failure, damaged=damaged
        )

    # ---- leases

    def expire_leases(self, late_sec: float = 0.0) -> None:
        """Removes workers and shards whose lease has ended, and informs the shards.

        Args:
            late_sec: how long this process could not receive heartbeats, because it was stopped or starved; all leases
                are extended by it.
        """
        if late_sec > 0:
            log.warning("the coordinator did not run for %.1f s; all leases are extended by that time", late_sec)
            self._cluster.shards.extend(late_sec)
            self._cluster.jobs.extend(late_sec)
        now = self._clock()
        for shard in self._cluster.shards.expire(now):
            log.warning("shard %d (process %d) is lost: it sent no heartbeat", shard.index, shard.pid)
        lacks_shard = self._cluster.shards.problem()  # one that comes back may wait for the end of jobs
        ended = self._cluster.end_leases(now, time.time(), self._cluster.jobs.jobs if lacks_shard else ())
        self._forget_ended(now)
        if ended:
            self._registrations.notify()
        if not self._cluster.shards.problem():
            for job_id in self._operations.unsettled():
                self._begin(self._registrations.after_leaving(job_id))

    def _wait_for(self, job_ids: Collection[int]) -> None:
        """Ends the leases of late workers of some jobs, for which something waits; shards hear of it soon."""
        self._cluster.end_leases(self._clock(), time.time(), job_ids)

    async def _wait_for_end(self, job_ids: Collection[int]) -> None:
        """As :meth:`_wait_for`; returns when the shards have heard of the jobs that are over now."""
        self._wait_for(job_ids)
        await self._operations.settle_ended()

    def _forget_ended(self, now: float) -> None:
        """Forgets jobs that ended long ago; the saved state follows with its next change."""
        cluster = self._cluster
        if forgotten := cluster.jobs.forget_ended(cluster.rosters, now):
            log.info("the state of %d ended jobs is removed", len(forgotten))
        cluster.data.bound(cluster.jobs.jobs)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that belongs to the service and is cancelled with it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
