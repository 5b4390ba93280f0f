"""Carries a change of a job's members to all shards: HOLD, decide, RESOLVE."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable

from .cluster import Cluster
from .fleet import Fleet
from .membership import Job, Ticket
from .roster import Roster

log = logging.getLogger(__name__)


class Operations:
    """One operation per job at a time. Belongs to one event loop.

    Args:
        cluster: its rosters are changed only here.
        fleet: reaches the shards.
        save: puts the cluster on disk (or nowhere), before anything is told to a shard.
    """

    def __init__(self, cluster: Cluster, fleet: Fleet, save: Callable[[], None]) -> None:
        self._cluster = cluster
        self._fleet = fleet
        self._save = save
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._settled: dict[int, tuple[int, int]] = {}  # job id -> (generation, revision) that all shards know

    def unsettled(self) -> list[int]:
        """Jobs of which the shards do not know the present members, because they could not be told."""
        wanted = {job_id for job_id, job in self._cluster.jobs.jobs.items() if not self._is_settled(job_id, job)}
        over = {job_id for job_id in self._cluster.rosters if job_id not in self._cluster.jobs.jobs}
        return sorted(job_id for job_id in wanted | over if not self._locks[job_id].locked())

    async def settle(self, job_id: int) -> None:
        """Brings all shards to a job's present members, or to its end; returns at once when they know.

        Raises:
            SparserowError: a shard could not be asked or told; what was decided stands, and is told the next time.
        """
        async with self._locks[job_id]:
            while True:
                job = self._cluster.jobs.jobs.get(job_id)
                if job is None and job_id not in self._cluster.rosters:
                    self._settled.pop(job_id, None)
                    return
                if job is not None and self._is_settled(job_id, job):
                    return
                await self._operate(job_id, job)

    def _is_settled(self, job_id: int, job: Job) -> bool:
        return self._settled.get(job_id) == (job.generation, job.revision)

    async def _operate(self, job_id: int, job: Job | None) -> None:
        """One operation, for the members of this moment; later changes are another operation's."""
        state = (job.generation, job.revision) if job is not None else None
        members = [member.ticket for member in job.members.values()] if job is not None and job.gathered else []
        roster = self._cluster.rosters.get(job_id)
        if roster is None:
            if job is None or not members:
                if state is not None:
                    self._settled[job_id] = state
                return
            roster = self._cluster.rosters[job_id] = Roster(job.full_name, job.terms.staleness, job.generation)
        if job is not None and job.generation == roster.generation:
            await self._change(job_id, roster, roster.gone(members), members)
        else:
            # The former clock ends: what its workers have in doubt is decided before the next one begins.
            await self._change(job_id, roster, roster.gone([]), [])
            if job is not None:
                roster.begin_generation(job.generation, job.full_name, job.terms.staleness)
                # Nobody works by the new clock yet, and what was done by the former one says nothing about its steps.
                roster.decide(self._next_operation(), [], [], members)
                self._save()
                await self._fleet.tell_job(job_id, roster)
        if job is None:
            await self._fleet.drop_job(job_id, self._next_operation())
            del self._cluster.rosters[job_id]
            self._settled.pop(job_id, None)
            self._save()
        elif state is not None:
            self._settled[job_id] = state

    async def _change(self, job_id: int, roster: Roster, gone: list[tuple[int, int]], members: list[Ticket]) -> None:
        operation = self._next_operation()
        reports = await self._fleet.hold_job(job_id, operation, gone)
        roster.decide(operation, gone, reports, members)
        self._save()
        await self._fleet.tell_job(job_id, roster)
        for worker_id, epoch in gone:
            log.info("worker %d (epoch %d) has left job %s on all shards", worker_id, epoch, roster.name)

    def _next_operation(self) -> int:
        """A number that no operation had, also after a restart."""
        self._cluster.operations += 1
        self._save()
        return self._cluster.operations
