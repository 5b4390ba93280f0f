"""Tells the shards what they must know: route, tables and jobs.

What is told is always the present state, and every shard is told one thing at a time, in order. A shard that cannot
be told is *behind*: it does not count as serving until its next heartbeat, when it is told everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from ...proto import control_pb2 as pb
from ...proto import control_pb2_grpc as pb_grpc
from ...proto.errors import FailedPrecondition, NotFound, SparserowError
from ...proto.grpc_status import CHANNEL_OPTIONS, error_of_status
from ...proto.schema_message import message_of_schema
from .cluster import Cluster
from .membership import Job
from .shards import Phase, Shard

log = logging.getLogger(__name__)

CALL_DEADLINE_SEC = 5.0


class ShardLink:
    """The connection to the process that holds a shard; made anew when another process takes over."""

    def __init__(self, instance: int, address: tuple[str, int], index: int) -> None:
        self.instance = instance
        self.lock = asyncio.Lock()
        self._peer = f"shard {index} at {address[0]}:{address[1]}"
        self._channel = grpc.aio.insecure_channel(f"{address[0]}:{address[1]}", options=CHANNEL_OPTIONS)
        self._stub: Any = pb_grpc.ShardStub(self._channel)

    async def call(self, method: str, request: Any) -> Any:
        """One call with a deadline; raises errors of the taxonomy."""
        try:
            return await getattr(self._stub, method)(request, timeout=CALL_DEADLINE_SEC)
        except grpc.RpcError as error:
            raise error_of_status(error, self._peer) from None

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()


class Fleet:
    """The shards of one cluster, as the coordinator reaches them. Belongs to one event loop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._links: dict[int, ShardLink] = {}
        self._told: dict[tuple[int, int], int] = {}  # (job id, generation) -> revision that all shards know

    async def close(self) -> None:
        """Ends all connections."""
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def catch_up(self, shard: Shard) -> None:
        """Tells a shard everything, and removes what it has and should not; then it serves.

        Raises:
            SparserowError: it could not be told; it stays behind.
        """
        link = await self._link(shard)
        async with link.lock:
            has = await link.call("Stats", pb.ShardStatsRequest())
            await link.call("SetRoute", pb.SetRouteRequest(route=self.route_message()))
            tables = {schema.id for schema in self._cluster.registry.tables()}
            jobs = set(self._cluster.jobs.jobs)
            for usage in has.tables:
                if usage.table_id not in tables:
                    await link.call("DropTable", pb.ShardDropTableRequest(table_id=usage.table_id))
            for job_id in has.job_ids:
                if job_id not in jobs:
                    await link.call("DropJob", pb.DropJobRequest(job_id=job_id))
            for schema in self._cluster.registry.tables():
                await link.call("CreateTable", pb.ShardCreateTableRequest(schema=message_of_schema(schema)))
            for job in list(self._cluster.jobs.jobs.values()):
                await link.call("SetJob", job_message(job))
            self._cluster.shards.mark_serving(shard.index, link.instance)

    async def create_table(self, message: pb.TableSchema) -> None:
        """Creates a table on every serving shard.

        Raises:
            SparserowError: the first shard's refusal; every shard has been asked.
        """
        await self._tell_all(lambda link: link.call("CreateTable", pb.ShardCreateTableRequest(schema=message)))

    async def drop_table(self, table_id: int) -> None:
        """Drops a table on every serving shard, where it may be gone already."""

        async def drop(link: ShardLink) -> None:
            with contextlib.suppress(NotFound):
                await link.call("DropTable", pb.ShardDropTableRequest(table_id=table_id))

        await self._tell_all(drop)

    async def highest_step(self, job_id: int) -> int:
        """The highest step of a job that a serving shard has a commit of; -1 when none has.

        Raises:
            SparserowError: a shard could not be asked.
        """
        live = [shard for shard in self._cluster.shards.shards if shard.is_live]
        replies = await asyncio.gather(*(self.stats(shard) for shard in live))
        return max((reply.job_steps.get(job_id, -1) for reply in replies), default=-1)

    async def tell_job(self, job_id: int) -> None:
        """Tells every serving shard a job's present members, or that it is over; does nothing when all know.

        Raises:
            SparserowError: as :meth:`create_table`.
        """
        jobs = self._cluster.jobs.jobs
        job = jobs.get(job_id)
        key = (job_id, job.generation) if job is not None else (job_id, 0)
        revision = job.revision if job is not None else 0
        if job is not None and self._told.get(key) == revision:
            return

        async def tell(link: ShardLink) -> None:
            current = jobs.get(job_id)
            if current is not None:
                await link.call("SetJob", job_message(current))
                return
            with contextlib.suppress(NotFound):
                await link.call("DropJob", pb.DropJobRequest(job_id=job_id))

        await self._tell_all(tell)
        for other in [told for told in self._told if told[0] == job_id]:
            del self._told[other]
        if job is not None:
            self._told[key] = revision

    async def stats(self, shard: Shard) -> pb.ShardStatsReply:
        """What a shard holds.

        Raises:
            SparserowError: it cannot be asked.
        """
        reply: pb.ShardStatsReply = await (await self._link(shard)).call("Stats", pb.ShardStatsRequest())
        return reply

    def route_message(self) -> pb.Route:
        """The present slot map."""
        slots = self._cluster.slots
        runs = [pb.SlotRun(start=start, shard=shard) for start, shard in slots.runs()]
        return pb.Route(epoch=slots.epoch, slot_count=slots.slot_count, runs=runs)

    async def _tell_all(self, tell: Callable[[ShardLink], Awaitable[None]]) -> None:
        serving = [shard for shard in self._cluster.shards.shards if shard.phase in (Phase.SERVING, Phase.DRAINING)]
        outcomes = await asyncio.gather(*(self._tell(shard, tell) for shard in serving), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _tell(self, shard: Shard, tell: Callable[[ShardLink], Awaitable[None]]) -> None:
        link = await self._link(shard)
        async with link.lock:
            try:
                await tell(link)
            except SparserowError as error:
                if error.code in ("Unavailable", "DeadlineExceeded"):
                    log.warning("shard %d is behind: %s", shard.index, error)
                    self._cluster.shards.mark_behind(shard.index, link.instance)
                raise

    async def _link(self, shard: Shard) -> ShardLink:
        link = self._links.get(shard.index)
        if link is not None and link.instance == shard.instance:
            return link
        if shard.control is None:
            raise FailedPrecondition(f"shard {shard.index} has not registered")
        fresh = self._links[shard.index] = ShardLink(shard.instance, shard.control, shard.index)
        if link is not None:
            await link.close()
        return fresh


def job_message(job: Job) -> pb.SetJobRequest:
    """A job as shards know it. Until all ranks have come there are no members, so nothing starts early."""
    members = [
        pb.JobMember(worker_id=member.ticket.worker_id, epoch=member.ticket.epoch, rank=rank)
        for rank, member in sorted(job.members.items())
        if job.gathered
    ]
    return pb.SetJobRequest(
        job_id=job.job_id,
        name=job.full_name,
        staleness=job.terms.staleness,
        members=members,
        generation=job.generation,
    )
