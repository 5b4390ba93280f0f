"""The Shard service, which passes the coordinator's messages to the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ...proto import control_pb2 as pb
from ...proto.schema_message import schema_of_message
from ...proto.security.fresh_security import fresh
from .checkpoints import ShardCheckpoints, in_thread
from .engine import ShardEngine
from .loads import CheckpointLoads
from .work_threads import OneAtATime, WorkThreads

_CONTROL_THREADS = 8
_CUT_THREADS = 2


class ShardService:
    """Answers one coordinator. It belongs to one event loop; work that may take long runs in a thread.

    Each kind of work has threads of its own. So sweeps, slow files and followers do not hold up a change of a job's
    members.

    Args:
        engine: returns the engine; raises Unavailable until the coordinator has sent its settings.
        drain: drains within the given milliseconds and ends the process.
    """

    def __init__(self, engine: Callable[[], ShardEngine], drain: Callable[[int], Awaitable[None]]) -> None:
        self._engine = engine
        self._drain = drain
        self._made_checkpoints: ShardCheckpoints | None = None
        self._control = WorkThreads("sparserow-control", _CONTROL_THREADS)
        self._cuts = WorkThreads("sparserow-cuts", _CUT_THREADS)
        self._sweeps: OneAtATime | None = None
        self._made_loads: CheckpointLoads | None = None

    async def CreateTable(self, request: pb.ShardCreateTableRequest, context: Any) -> pb.ShardCreateTableReply:
        """Creates tables."""
        schemas = [schema_of_message(schema) for schema in request.schemas]
        await self._control.run(self._engine().create_tables, schemas)
        return pb.ShardCreateTableReply()

    async def DropTable(self, request: pb.ShardDropTableRequest, context: Any) -> pb.ShardDropTableReply:
        """Drops a table; releasing its memory may take long."""
        await self._control.run(self._engine().drop_table, request.table_id)
        return pb.ShardDropTableReply()

    async def Sweep(self, request: pb.ShardSweepRequest, context: Any) -> pb.SweepTableReply:
        """Removes the rows that a table's policy no longer keeps, or counts them; refused while another sweep runs."""
        engine = self._engine()
        if self._sweeps is None:
            self._sweeps = OneAtATime("sparserow-sweep", f"shard {engine.shard}: a sweep")
        report = await self._sweeps.run(engine.sweeps.sweep, request.table_id, dry_run=request.dry_run)
        return pb.SweepTableReply(
            rows_seen=report.rows_seen,
            freed=[pb.SweepFreed(rows=freed.rows, bytes=freed.bytes) for freed in report.freed],
            complete=report.is_complete,
            longest_hold_sec=report.longest_hold_seconds,
        )

    async def SetRoute(self, request: pb.SetRouteRequest, context: Any) -> pb.SetRouteReply:
        """Takes over a slot map, and the tables that are refused."""
        engine = self._engine()
        engine.set_route(request.route)
        await self._control.run(engine.refuse, request.refusal)
        return pb.SetRouteReply()

    async def HoldJob(self, request: pb.FreezeJobRequest, context: Any) -> pb.FreezeJobReply:
        """Freezes a job: refuses new commits, fences the named workers, and reports what each worker has committed."""
        return await self._control.run(self._engine().freeze_job, request)

    async def SetJob(self, request: pb.SetJobRequest, context: Any) -> pb.SetJobReply:
        """Takes over the members of a job; steps that only waited for a member that left are applied meanwhile."""
        await self._control.run(self._engine().set_job, request)
        return pb.SetJobReply()

    async def DropJob(self, request: pb.DropJobRequest, context: Any) -> pb.DropJobReply:
        """Forgets a job."""
        await self._control.run(self._engine().drop_job, request.job_id, request.operation)
        return pb.DropJobReply()

    async def Stats(self, request: pb.ShardStatsRequest, context: Any) -> pb.ShardStatsReply:
        """Returns rows, bytes and request counters; where tables are named, theirs alone."""
        if request.table_ids:
            return await self._control.run(self._engine().tables_message, request.table_ids)
        reply = await self._control.run(self._engine().stats_message)
        reply.security_problem = fresh().problem
        return reply

    async def Cut(self, request: pb.CutRequest, context: Any) -> pb.CutReply:
        """Preserves the rows of one instant for Dump."""
        return await self._cuts.run(self._checkpoints().cut, request)

    async def Dump(self, request: pb.DumpRequest, context: Any) -> AsyncIterator[pb.DumpReply]:
        """Writes the rows of a cut, and yields a reply for each written file."""
        async for reply in in_thread(lambda: self._checkpoints().dump(request), gives_way=True):
            yield reply

    async def EndCut(self, request: pb.EndCutRequest, context: Any) -> pb.EndCutReply:
        """Releases a cut."""
        await self._cuts.run(self._checkpoints().end, request.save)
        return pb.EndCutReply()

    async def Load(self, request: pb.LoadRequest, context: Any) -> AsyncIterator[pb.LoadReply]:
        """Fills tables from a checkpoint, or compares its files with their manifests."""
        if self._made_loads is None:
            self._made_loads = CheckpointLoads(self._engine())
        work = self._made_loads.verify if request.verify_only else self._made_loads.load
        async for reply in in_thread(lambda: work(request)):
            yield reply

    def _checkpoints(self) -> ShardCheckpoints:
        if self._made_checkpoints is None:
            self._made_checkpoints = ShardCheckpoints(self._engine())
        return self._made_checkpoints

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        """Drains and ends the process."""
        await self._drain(request.deadline_ms)
        return pb.DrainReply()
