"""Carries a change of a job's members to all shards: FREEZE, decide, RESOLVE."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ....proto.errors import SparserowError, Unavailable
from ..state.cluster import Cluster
from ..state.membership import Job, Ticket
from ..state.roster import CommitWindow, Roster, WorkerKey
from .shard_calls import ShardCalls, all_of

log = logging.getLogger(__name__)

CUT_DEADLINE_SEC = 10.0  # duration of a cut; its jobs stay frozen as long, even when this process ends

Result = TypeVar("Result")


@dataclass(frozen=True)
class CutPoint:
    """The point at which a frozen job is cut: the last commits that any shard has accepted.

    Attributes:
        job_id: the id of the job.
        operation: the number of the FREEZE.
        staleness: the staleness of the job; None means asynchronous.
        step: the highest step that any shard accepted; -1 before the first.
        sequences: the last sequence number that any shard accepted, of each live worker.
        steps: the step of that sequence number, of each live worker; -1 before the first.
    """

    job_id: int
    operation: int
    staleness: int | None
    step: int
    sequences: dict[WorkerKey, int]
    steps: dict[WorkerKey, int]

    @staticmethod
    def of_reports(
        job_id: int, operation: int, roster: Roster, reports: list[dict[WorkerKey, CommitWindow]]
    ) -> CutPoint:
        """Returns the cut that the reports of the shards about a FREEZE determine."""
        step = max((window.committed_step for report in reports for window in report.values()), default=-1)
        last: dict[WorkerKey, list[CommitWindow]] = {
            span.key: [report.get(span.key, CommitWindow()) for report in reports]
            for span in roster.spans.values()
            if span.until_step is None
        }
        sequences = {key: max(window.committed_sequence for window in last[key]) for key in last}
        steps = {key: max(window.committed_step for window in last[key]) for key in last}
        return CutPoint(job_id, operation, roster.staleness, step, sequences, steps)


def _windows(point: CutPoint, generation: int, first_step: int) -> dict[str, Any]:
    """Returns what the next clock knows of a job's workers (``install_jobs``): all that they sent before is over."""
    workers = [
        {
            "worker_id": worker_id,
            "epoch": epoch,
            "forgotten_below": sequence + 1,
            "committed_sequence": sequence,
            "committed_step": first_step - 1,
            "done_step": first_step - 1,
            "answers": [],
            "aborted": [],
            "steps_ahead": [],
            "steps_taken": 0,
            "writes_taken": 0,
        }
        for (worker_id, epoch), sequence in point.sequences.items()
    ]
    return {"job_id": point.job_id, "generation": generation, "completed": first_step - 1, "workers": workers}


class JobOperations:
    """Carries out operations on jobs, one operation per job at a time. It belongs to one event loop.

    Args:
        cluster: the state of the cluster; only this class changes its rosters.
        shard_calls: the connections to the shards.
        save: saves the cluster, where it is saved, before anything is sent to a shard.
    """

    def __init__(self, cluster: Cluster, shard_calls: ShardCalls, save: Callable[[], None]) -> None:
        self._cluster = cluster
        self._shard_calls = shard_calls
        self._save = save
        # By job id: the locks of the jobs with an operation under way.
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        self._settled: dict[int, tuple[int, int]] = {}  # job id -> (generation, revision) that all shards know
        self._taking: asyncio.Future[Any] | None = None  # the cut that freezes the jobs now; None: there is none

    def unsettled(self) -> list[int]:
        """Returns the jobs whose present members the shards do not know, because they could not be informed."""
        wanted = {job_id for job_id, job in self._cluster.jobs.jobs.items() if not self._is_settled(job_id, job)}
        over = {job_id for job_id in self._cluster.rosters if job_id not in self._cluster.jobs.jobs}
        return sorted(job_id for job_id in wanted | over if not self._lock_of(job_id).locked())

    async def settle(self, job_id: int) -> None:
        """Informs all shards of a job's present members, or of its end; returns at once when they know.

        Raises:
            SparserowError: a shard could not be asked or informed. The decision stands, and is sent the next time.
        """
        changed = self._cluster.jobs.jobs.get(job_id)
        if self._taking is not None and (changed is None or not self._is_settled(job_id, changed)):
            self._taking.cancel()  # a worker that joins or leaves does not wait for a cut
        async with self._lock_of(job_id):
            while True:
                job = self._cluster.jobs.jobs.get(job_id)
                if job is None and job_id not in self._cluster.rosters:
                    self._settled.pop(job_id, None)
                    return
                if job is not None and self._is_settled(job_id, job):
                    return
                await self._operate(job_id, job)

    async def settle_ended(self) -> None:
        """Informs the shards of the jobs that are over, so that no late commit of one comes after this call.

        A shard that cannot be reached hears of it before it serves again.
        """
        for job_id in [each for each in self._cluster.rosters if each not in self._cluster.jobs.jobs]:
            with contextlib.suppress(SparserowError):
                await self.settle(job_id)

    def _lock_of(self, job_id: int) -> asyncio.Lock:
        return self._locks.setdefault(job_id, asyncio.Lock())

    def _is_settled(self, job_id: int, job: Job) -> bool:
        return self._settled.get(job_id) == (job.generation, job.revision)

    async def _operate(self, job_id: int, job: Job | None) -> None:
        """Carries out one operation for the present members; later changes belong to another operation."""
        state = (job.generation, job.revision) if job is not None else None
        members = [member.ticket for member in job.members.values()] if job is not None and job.gathered else []
        roster = self._cluster.rosters.get(job_id)
        if roster is None:
            if job is None or not members:
                if state is not None:
                    self._settled[job_id] = state
                return
            roster = self._cluster.rosters[job_id] = Roster(
                job.full_name, job.terms.staleness, job.generation, quorum=job.terms.quorum
            )
        if job is not None and job.generation == roster.generation:
            await self._change(job_id, roster, roster.gone(members), members)
        else:
            # The former clock ends: the doubtful commits of its workers are decided before the next clock begins.
            await self._change(job_id, roster, roster.gone([]), [])
            if job is not None:
                roster.begin_generation(job.generation, job.full_name, job.terms.staleness, job.terms.quorum)
                # No worker has the new clock yet, and commits of the former clock say nothing about its steps.
                roster.decide(self._next_operation(), [], [], members)
                self._save()
                await self._shard_calls.send_job(job_id, roster)
        if job is None:
            await self._shard_calls.drop_job(job_id, self._next_operation())
            del self._cluster.rosters[job_id]
            self._settled.pop(job_id, None)
            self._save()
        elif state is not None:
            self._settled[job_id] = state

    async def cut(self, take: Callable[[list[CutPoint]], Awaitable[Result]]) -> Result:
        """Freezes all jobs, names the cut, lets ``take`` take it, and then releases the jobs, also after an error.

        Args:
            take: lets the shards cut at the given points; the shards continue to accept commits up to them.

        Raises:
            Unavailable: a worker joined or left meanwhile.
            SparserowError: a shard could not be asked, or ``take`` raised it.
        """
        async with contextlib.AsyncExitStack() as stack:
            for job_id in sorted(self._cluster.rosters):
                await stack.enter_async_context(self._lock_of(job_id))
            rosters = dict(sorted(self._cluster.rosters.items()))
            for roster in rosters.values():
                roster.operation = self._next_operation()

            async def freeze(job_id: int, roster: Roster) -> CutPoint:
                reports = await self._shard_calls.freeze_job(job_id, roster.operation, [], CUT_DEADLINE_SEC)
                return CutPoint.of_reports(job_id, roster.operation, roster, reports)

            # All jobs are frozen at the same time; pushes of their workers wait meanwhile.
            stack.push_async_callback(lambda: all_of(self._release(job_id) for job_id in rosters))
            points: list[CutPoint] = await all_of(freeze(*roster) for roster in rosters.items())
            taking: asyncio.Future[Result] = asyncio.ensure_future(take(points))
            self._taking = taking
            try:
                return await taking
            except asyncio.CancelledError:
                if not taking.cancelled():
                    taking.cancel()
                    raise
                raise Unavailable("a worker joined or left while the cut was taken; save again") from None
            finally:
                self._taking = None

    async def restart(self, job_id: int, first_step: int, load: Callable[[str], Awaitable[Result]]) -> Result:
        """Freezes a job while its rows are replaced; its workers wait, and begin a new clock afterwards.

        Args:
            job_id: the id of the job; its members are those of the present generation.
            first_step: the first step of the new clock. No step of the former clock is as high, so no late commit is
                accepted.
            load: replaces the rows, and gives every shard these windows (JSON) before the new clock begins.

        Raises:
            Unavailable: the job has ended.
            SparserowError: a shard could not be asked, or ``load`` raised it. The former clock then continues.
        """
        async with self._lock_of(job_id):
            roster, job = self._cluster.rosters.get(job_id), self._cluster.jobs.jobs.get(job_id)
            if roster is None or job is None:
                raise Unavailable(f"job {job_id} has ended before its restore began; restore again")
            operation = roster.operation = self._next_operation()
            try:
                reports = await self._shard_calls.freeze_job(job_id, operation, [])
                point = CutPoint.of_reports(job_id, operation, roster, reports)
                generation = self._cluster.jobs.new_generation()
                self._save()  # saved first: a failed restore may leave windows of this clock, which then never begins
                result = await load(json.dumps([_windows(point, generation, first_step)]))
            except BaseException:
                await self._release(job_id)
                raise
            tickets = [member.ticket for member in job.members.values()]
            generation, terms = self._cluster.jobs.begin_clock(job, generation), job.terms
            roster.begin_generation(generation, job.full_name, terms.staleness, terms.quorum)
            roster.decide(self._next_operation(), [], [], tickets, reached=first_step - 1)
            self._save()
            await self._shard_calls.send_job(job_id, roster)
            self._settled[job_id] = (job.generation, job.revision)
            return result

    async def _release(self, job_id: int) -> None:
        """Lets a frozen job accept commits again from its former members, also when only some
        shards can be informed.
        """
        try:
            await self._shard_calls.send_job(job_id, self._cluster.rosters[job_id], all_or_none=False)
        except SparserowError as error:  # the shard is behind now, and is informed when it is back
            log.warning("job %d: %s", job_id, error)

    async def _change(self, job_id: int, roster: Roster, gone: list[tuple[int, int]], members: list[Ticket]) -> None:
        if not gone and roster.has_all(members):
            # The shards only need the present state again, as after a restart. Nothing is to decide, so no job is
            # frozen.
            roster.operation = self._next_operation()
            self._save()
            await self._shard_calls.send_job(job_id, roster)
            return
        operation = self._next_operation()
        reports = await self._shard_calls.freeze_job(job_id, operation, gone)
        roster.decide(operation, gone, reports, members)
        for key in gone:
            last_step = max((report.get(key, CommitWindow()).committed_step for report in reports), default=-1)
            self._cluster.data.left(job_id, key, last_step, is_orderly=(job_id, *key) in self._cluster.leaving)
            self._cluster.note_left(job_id, key, [report.get(key, CommitWindow()) for report in reports])
        self._save()
        await self._shard_calls.send_job(job_id, roster)
        for worker_id, epoch in gone:
            log.info("worker %d (epoch %d) has left job %s on all shards", worker_id, epoch, roster.name)

    def _next_operation(self) -> int:
        """Returns and saves a number that no operation had, also after a restart."""
        self._cluster.operations += 1
        self._save()
        return self._cluster.operations
