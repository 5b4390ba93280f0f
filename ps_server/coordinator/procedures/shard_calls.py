"""Sends the shards the state that they need: route, tables and jobs.

A message always has the present state, and every shard receives one message at a time, in order. A shard that cannot be
informed is *behind*: it does not count as serving until its next heartbeat, when it receives the whole state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ....proto import control_pb2 as pb
from ....proto.errors import FailedPrecondition, NotFound, SparserowError, Unavailable
from ....proto.schema import TableSchema
from ....proto.schema_message import message_of_schema
from ....proto.shard_protocol import QUORUM_PROTOCOL, SAVES_PROTOCOL
from ..state.cluster import Cluster
from ..state.roster import CommitWindow, Roster, WorkerKey
from ..state.shards import Shard, ShardPhase
from .shard_link import CALL_DEADLINE_SEC, ShardLink

log = logging.getLogger(__name__)

REFUSAL_DEADLINE_SEC = 40.0  # earlier requests for rows end within it
_LOOK_SEC = 0.5
_TABLES_A_CALL = 1000


class ShardCalls:
    """The connections of the coordinator to the shards of one cluster. It belongs to one event loop.

    Args:
        cluster: the cluster of the shards.
        written: returns when the present state of the cluster is saved; messages that depend on it are sent afterwards.
    """

    def __init__(self, cluster: Cluster, written: Callable[[], Awaitable[None]] | None = None) -> None:
        self._cluster = cluster
        self._written = written
        self._links: dict[int, ShardLink] = {}

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def state_is_written(self) -> None:
        """Returns when the present state of the cluster is saved.

        Raises:
            SparserowError: the state cannot be saved.
        """
        if self._written is not None:
            await self._written()

    async def catch_up(self, shard: Shard) -> None:
        """Sends a shard the whole state, and removes tables and jobs that it should not have; then it serves.

        Raises:
            SparserowError: the shard could not be informed; it stays behind.
        """
        await self.state_is_written()
        link = await self._link(shard)
        async with link.lock:
            has = await link.call("Stats", pb.ShardStatsRequest())
            shard.protocol = max(1, has.protocol)
            tables = {schema.id for schema in self._cluster.registry.tables()}
            rosters = self._cluster.rosters
            for usage in has.tables:
                if usage.table_id not in tables:
                    await link.call("DropTable", pb.ShardDropTableRequest(table_id=usage.table_id))
            for job_id in has.job_ids:
                if job_id not in rosters:
                    await link.call("DropJob", pb.DropJobRequest(job_id=job_id, operation=self._cluster.operations))
            tables_a_call = 1 if shard.protocol < SAVES_PROTOCOL else _TABLES_A_CALL
            for schemas in _batches(self._cluster.registry.tables(), tables_a_call):
                await link.call("CreateTable", pb.ShardCreateTableRequest(schemas=map(message_of_schema, schemas)))
            for job_id, roster in list(rosters.items()):
                # The shard refuses this when a newer operation has begun on it, whose decision is sent in turn.
                with contextlib.suppress(FailedPrecondition):
                    await link.call("SetJob", self._job_message(job_id, roster))
            # A shard without a route refuses every call as not ready, so no caller meets a shard with half of the
            # state.
            await link.call("SetRoute", self._route_request())
            self._cluster.shards.mark_serving(shard.index, link.instance)

    async def send_refusal(self) -> None:
        """Sends every serving shard the tables that are refused; returns when no request sees their rows any more.

        Raises:
            SparserowError: as for :meth:`create_table`.
        """
        request = self._route_request()
        await self._call_all(lambda link: link.call("SetRoute", request, REFUSAL_DEADLINE_SEC))

    def _route_request(self) -> pb.SetRouteRequest:
        return pb.SetRouteRequest(route=self.route_message(), refusal=self._cluster.refusal())

    async def create_table(self, message: pb.TableSchema) -> None:
        """Creates a table on every serving shard.

        Raises:
            SparserowError: the refusal of the first shard that refused; every shard has been asked.
        """
        await self._call_all(lambda link: link.call("CreateTable", pb.ShardCreateTableRequest(schemas=[message])))

    async def drop_table(self, table_id: int) -> None:
        """Drops a table on every serving shard; a shard that lacks the table is left as it is."""

        async def drop(link: ShardLink) -> None:
            with contextlib.suppress(NotFound):
                await link.call("DropTable", pb.ShardDropTableRequest(table_id=table_id))

        await self._call_all(drop)

    async def sweep(self, table_id: int, *, dry_run: bool, deadline_sec: float | None) -> pb.SweepTableReply:
        """Sweeps a table on every serving shard; other calls do not wait for it.

        Raises:
            SparserowError: the error of the first shard that failed; the other shards have been asked.
        """
        request = pb.ShardSweepRequest(table_id=table_id, dry_run=dry_run)
        serving = [shard for shard in self._cluster.shards.shards if shard.phase is ShardPhase.SERVING]
        links = [await self._link(shard) for shard in serving]
        replies = await asyncio.gather(*(link.call("Sweep", request, deadline_sec) for link in links))
        return pb.SweepTableReply(
            rows_seen=sum(reply.rows_seen for reply in replies),
            freed=[
                pb.SweepFreed(rows=sum(freed.rows for freed in rule), bytes=sum(freed.bytes for freed in rule))
                for rule in zip(*(reply.freed for reply in replies), strict=True)
            ],
            complete=all(reply.complete for reply in replies),
            longest_hold_sec=max((reply.longest_hold_sec for reply in replies), default=0.0),
        )

    async def freeze_job(
        self, job_id: int, operation: int, fence: Sequence[WorkerKey], lease_sec: float = 0.0
    ) -> list[dict[WorkerKey, CommitWindow]]:
        """Freezes a job on every shard, and returns what each shard knows of each worker's commits.

        Args:
            job_id: the id of the job.
            operation: the number of this operation.
            fence: the (worker id, epoch) pairs whose commits the shards refuse from now on.
            lease_sec: the time after which the shards release the job by themselves, in case this process has ended; 0
                means never.

        Raises:
            Unavailable: a shard cannot be reached; the job is frozen on the others now.
            SparserowError: as for :meth:`create_table`.
        """
        self._check_all_reached()
        request = pb.FreezeJobRequest(
            job_id=job_id,
            operation=operation,
            fence=[pb.WorkerEpoch(worker_id=worker_id, epoch=epoch) for worker_id, epoch in fence],
            lease_ms=round(lease_sec * 1000),
        )
        replies = await self._call_all(lambda link: link.call("HoldJob", request))
        return [
            {
                (window.worker_id, window.epoch): CommitWindow(
                    window.committed_sequence, window.committed_step, window.steps_taken, window.writes_taken
                )
                for window in reply.windows
            }
            for reply in replies
        ]

    async def send_job(self, job_id: int, roster: Roster, *, all_or_none: bool = True) -> None:
        """Sends every shard the decided members of a job; a shard that is away receives them when it is back.

        Args:
            job_id: the id of the job.
            roster: the decided members.
            all_or_none: whether no shard is informed when one is away.

        Raises:
            SparserowError: as for :meth:`create_table`; with ``all_or_none`` also when a shard is away.
        """
        if all_or_none:
            self._check_all_reached()
        await self._call_all(lambda link: link.call("SetJob", self._job_message(job_id, roster)))

    def _job_message(self, job_id: int, roster: Roster) -> pb.SetJobRequest:
        identities = self._cluster.jobs.identities.get(job_id, {})
        newest = filter(None, (identities.get(span.rank) for span in roster.spans.values()))
        proofs = {(identity.worker_id, identity.epoch): identity.proof_sha256 for identity in newest}
        return job_message(job_id, roster, proofs)

    async def drop_job(self, job_id: int, operation: int) -> None:
        """Ends a job on every serving shard; a shard that does not know the job is left as it is.

        Raises:
            SparserowError: as for :meth:`create_table`.
        """

        async def drop(link: ShardLink) -> None:
            with contextlib.suppress(NotFound):
                await link.call("DropJob", pb.DropJobRequest(job_id=job_id, operation=operation))

        await self._call_all(drop)

    async def stats(self, shard: Shard, table_ids: Iterable[int] = ()) -> pb.ShardStatsReply:
        """Returns the statistics of a shard; with ``table_ids`` those of these tables, and nothing else.

        Raises:
            SparserowError: the shard cannot be asked.
        """
        reply: pb.ShardStatsReply = await (await self._link(shard)).call(
            "Stats", pb.ShardStatsRequest(table_ids=table_ids)
        )
        return reply

    async def usage_of_tables(self, table_ids: Collection[int]) -> list[pb.TableUsage]:
        """Returns the rows and bytes of tables on every shard, one entry for each table of a shard.

        Raises:
            SparserowError: a shard cannot be asked.
        """
        if not table_ids:  # of which a shard would call everything
            return []
        replies = await all_of(self.stats(shard, table_ids) for shard in self._cluster.shards.shards)
        return [usage for reply in replies for usage in reply.tables]

    async def cut(self, request: pb.CutRequest) -> list[pb.CutReply]:
        """Lets every shard preserve its rows of one instant.

        Raises:
            FailedPrecondition: a shard runs an earlier build.
            SparserowError: as for :meth:`create_table`.
        """
        self._check_all_reached()
        for shard in self._cluster.shards.shards:
            _check_build(shard)
        await self.state_is_written()
        deadline_sec = request.deadline_ms / 1000 + CALL_DEADLINE_SEC
        links = [await self._link(shard) for shard in self._cluster.shards.shards]
        return await all_of(link.call("Cut", request, deadline_sec=deadline_sec) for link in links)

    async def end_cut(self, save: str) -> None:
        """Lets every shard that can be reached release the rows that it preserves for a save."""
        request = pb.EndCutRequest(save=save)
        serving = [shard for shard in self._cluster.shards.shards if shard.is_live]
        links = [await self._link(shard) for shard in serving]
        await asyncio.gather(*(link.call("EndCut", request) for link in links), return_exceptions=True)

    async def stream(self, shard: Shard, method: str, request: Any) -> AsyncIterator[Any]:
        """Yields the replies of a long call to one shard, which may take any time while the shard lives.

        Raises:
            Unavailable: the shard's lease has ended, or another process has the shard now.
            FailedPrecondition: the shard runs an earlier build.
            SparserowError: the shard answered with it.
        """
        _check_build(shard)
        await self.state_is_written()
        link = await self._link(shard)
        replies = link.stream(method, request)
        while True:
            coming = asyncio.ensure_future(anext(replies, None))
            try:
                while not (await asyncio.wait({coming}, timeout=_LOOK_SEC))[0]:
                    if not shard.is_live or shard.instance != link.instance:
                        raise Unavailable(f"shard {shard.index} was lost while it was asked to {method.lower()}")
            finally:
                coming.cancel()  # ends the call, unless it has been answered
            reply = coming.result()
            if reply is None:
                return
            yield reply

    def route_message(self) -> pb.Route:
        """Returns the present slot map."""
        slots = self._cluster.slots
        runs = [pb.SlotRun(start=start, shard=shard) for start, shard in slots.runs()]
        return pb.Route(epoch=slots.epoch, slot_count=slots.slot_count, runs=runs)

    def _check_all_reached(self) -> None:
        for shard in self._cluster.shards.shards:
            if shard.phase not in (ShardPhase.SERVING, ShardPhase.DRAINING):
                raise Unavailable(f"shard {shard.index} is {shard.phase.name}: members of a job change on all or none")

    async def _call_all(self, call: Callable[[ShardLink], Awaitable[Any]]) -> list[Any]:
        await self.state_is_written()
        serving = [
            shard for shard in self._cluster.shards.shards if shard.phase in (ShardPhase.SERVING, ShardPhase.DRAINING)
        ]
        return await all_of(self._call_one(shard, call) for shard in serving)

    async def _call_one(self, shard: Shard, call: Callable[[ShardLink], Awaitable[Any]]) -> Any:
        link = await self._link(shard)
        async with link.lock:
            try:
                return await call(link)
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


def _batches(schemas: list[TableSchema], size: int) -> Iterable[list[TableSchema]]:
    return (schemas[begin : begin + size] for begin in range(0, len(schemas), size))


def _check_build(shard: Shard) -> None:
    """Raises FailedPrecondition when a shard is known to run an earlier build, whose checkpoints have another form."""
    if 0 < shard.protocol < SAVES_PROTOCOL:
        raise FailedPrecondition(
            f"shard {shard.index} runs an earlier build, whose checkpoints have another form; restart it with "
            "this build, then save or restore"
        )


def check_knows_quorum(shards: Iterable[Shard]) -> None:
    """Raises FailedPrecondition when a shard is known to run an earlier build, which would wait for every worker."""
    for shard in shards:
        if 0 < shard.protocol < QUORUM_PROTOCOL:
            raise FailedPrecondition(
                f"quorum: shard {shard.index} runs an earlier build, which knows no quorum; restart it with this build"
            )


async def all_of(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Returns all results; raises the first error once all calls have ended."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def job_message(job_id: int, roster: Roster, proofs: Mapping[tuple[int, int], bytes]) -> pb.SetJobRequest:
    """Returns a job in the form that shards receive.

    Args:
        job_id: the id of the job.
        roster: the members of the job.
        proofs: the SHA-256 of the proof of each worker, by (worker id, epoch).
    """
    return pb.SetJobRequest(
        job_id=job_id,
        name=roster.name,
        staleness=roster.staleness,
        members=[
            pb.JobMember(
                worker_id=span.worker_id,
                epoch=span.epoch,
                rank=span.rank,
                first_step=span.first_step,
                until_step=span.until_step,
                final_sequence=span.final_sequence,
                proof_sha256=proofs.get(span.key, b""),
            )
            for span in roster.spans.values()
        ],
        generation=roster.generation,
        operation=roster.operation,
        quorum=roster.quorum or 0,
    )
