"""The Shard service: the coordinator's words, handed to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ...proto import control_pb2 as pb
from ...proto.schema_message import schema_of_message
from .engine import ShardEngine


class ShardService:
    """Answers one coordinator. Belongs to one event loop; what may take long runs in a thread.

    Args:
        engine: gives the engine; raises Unavailable until the coordinator has said how it must be made.
        drain: drains within the given milliseconds and ends the process.
    """

    def __init__(self, engine: Callable[[], ShardEngine], drain: Callable[[int], Awaitable[None]]) -> None:
        self._engine = engine
        self._drain = drain

    async def CreateTable(self, request: pb.ShardCreateTableRequest, context: Any) -> pb.ShardCreateTableReply:
        """Creates a table."""
        await asyncio.to_thread(self._engine().create_table, schema_of_message(request.schema))
        return pb.ShardCreateTableReply()

    async def DropTable(self, request: pb.ShardDropTableRequest, context: Any) -> pb.ShardDropTableReply:
        """Drops a table; giving its memory back may take long."""
        await asyncio.to_thread(self._engine().drop_table, request.table_id)
        return pb.ShardDropTableReply()

    async def SetRoute(self, request: pb.SetRouteRequest, context: Any) -> pb.SetRouteReply:
        """Takes a slot map over."""
        self._engine().set_route(request.route)
        return pb.SetRouteReply()

    async def HoldJob(self, request: pb.HoldJobRequest, context: Any) -> pb.HoldJobReply:
        """Takes no new commit of a job, fences whom it is told, and reports."""
        return await asyncio.to_thread(self._engine().hold_job, request)

    async def SetJob(self, request: pb.SetJobRequest, context: Any) -> pb.SetJobReply:
        """Takes a job's members over; steps that only waited for a member that left are applied meanwhile."""
        await asyncio.to_thread(self._engine().set_job, request)
        return pb.SetJobReply()

    async def DropJob(self, request: pb.DropJobRequest, context: Any) -> pb.DropJobReply:
        """Forgets a job."""
        await asyncio.to_thread(self._engine().drop_job, request.job_id, request.operation)
        return pb.DropJobReply()

    async def Stats(self, request: pb.ShardStatsRequest, context: Any) -> pb.ShardStatsReply:
        """Rows, bytes and requests."""
        return await asyncio.to_thread(self._engine().stats_message)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        """Drains and ends the process."""
        await self._drain(request.deadline_ms)
        return pb.DrainReply()
