"""Saves: gathers a job's workers, names the cut, lets the shards write, and writes the manifest last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from ....proto import control_pb2 as pb
from ....proto.checkpoint import manifest as files
from ....proto.checkpoint.folder import Folder
from ....proto.checkpoint.urls import check_url
from ....proto.documents import parse_json
from ....proto.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SparserowError,
    Unavailable,
    error_of,
    not_allowed,
)
from ....proto.grpc_status import NotLeader
from ..state.cluster import Cluster
from ..state.faults import MESSAGE_CHARS, one_line
from ..state.membership import Job
from ..state.shards import Shard
from .membership_change import CUT_DEADLINE_SEC, CutPoint, JobOperations
from .save import Caller, Save, SavePhase
from .save_base import find_base
from .shard_calls import ShardCalls, all_of
from .written_files import WrittenFiles

log = logging.getLogger(__name__)

PART_BYTES = 32 << 20
_MOST_CONFIG_BYTES = 1 << 20  # the largest configuration of a job
_GATHER_DEADLINE_SEC = 600.0
_GATHER_POLL_SEC = 0.02


class CheckpointSaves:
    """Saves a cluster, one save at a time. It belongs to one event loop.

    Args:
        cluster: the cluster that is saved.
        shard_calls: the connections to the shards.
        operations: freezes the jobs for the cut.
        note: saves the state of the cluster.
        wait_for: ends the leases of late workers of jobs, for which something waits.
    """

    def __init__(
        self,
        cluster: Cluster,
        shard_calls: ShardCalls,
        operations: JobOperations,
        note: Callable[[], None],
        wait_for: Callable[[Collection[int]], None],
    ) -> None:
        self._cluster, self._note, self._wait_for = cluster, note, wait_for
        self._shard_calls = shard_calls
        self._operations = operations
        self._saves: dict[tuple[str, str], Save] = {}  # the last few saves, by (url, name)
        self._current: Save | None = None
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: dict[str, set[str]] = {}  # names of checkpoints, by URL of their folder

    async def close(self) -> None:
        """Cancels a save that is under way; its folder gets no manifest."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def begin(self, request: pb.BeginSaveRequest) -> pb.BeginSaveReply:
        """Opens a save, or joins the one that another worker of the job has opened; waits while another save is
        writing.

        Raises:
            InvalidArgument, FailedPrecondition: the URL is not allowed here.
            SparserowError: the folder cannot be made.
        """
        caller, attempt = self._caller(request.caller), request.caller.attempt
        folder = await asyncio.to_thread(Folder, self._cluster.checkpoint_roots.check(request.url))
        if caller[0] and not attempt:
            raise not_allowed("caller.attempt", attempt, ">= 1 of a worker")
        while True:
            async with self._opening:  # released during another save, whose workers also come here
                current, job = self._current, self._job(caller)
                mine = None
                if current is not None and job is not None:
                    mine = current if (current.job_id, current.attempt) == (job.job_id, attempt) else None
                if mine is not None and mine.phase is SavePhase.GATHERING:
                    return self._join(mine, folder, caller)
                if job is not None and mine is None and attempt <= job.saves_begun:
                    return self._ended(job, attempt)
                if current is None:
                    return await self._open(folder, caller, attempt)
            await current.is_over.wait()

    def _job(self, caller: Caller) -> Job | None:
        """Returns the job of a worker, which may have ended since it called; None for a caller without one."""
        if not caller[0]:
            return None
        self._cluster.jobs.find(*caller)
        return self._cluster.jobs.jobs[caller[0]]

    @staticmethod
    def _join(save: Save, folder: Folder, caller: Caller) -> pb.BeginSaveReply:
        if save.folder.url != folder.url:
            raise InvalidArgument(
                f"save: another worker of the job saves to {save.folder.url}, this one to {folder.url}; all workers of "
                "a job save to one folder"
            )
        save.begun.add(caller)
        return pb.BeginSaveReply(name=save.name, attempts=save.attempt)

    def _ended(self, job: Job, attempt: int) -> pb.BeginSaveReply:
        """Answers a worker that comes late to an attempt of its job: with the end of it."""
        found = (each for each in self._saves.values() if each.job_id == job.job_id and each.attempt == attempt)
        save = next(found, None)
        problem: SparserowError | None = None if save is None else save.problem
        if problem is None:
            problem = Unavailable(f"save {attempt} of the job has ended without this worker; save again")
        return pb.BeginSaveReply(problem=str(problem), problem_code=problem.number, attempts=job.saves_begun)

    async def _open(self, folder: Folder, caller: Caller, attempt: int) -> pb.BeginSaveReply:
        self._cluster.check_ready()
        self._cluster.check_whole()
        name = await asyncio.to_thread(files.begin_folder, folder, self._known_in(folder))
        save = self._current = self._saves[folder.url, name] = Save(folder, name, caller[0], attempt, {caller})
        if (job := self._cluster.jobs.jobs.get(caller[0])) is not None:
            job.saves_begun = attempt
        for old in list(self._saves)[:-16]:
            del self._saves[old]
        task = asyncio.get_running_loop().create_task(self._run(save))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return pb.BeginSaveReply(name=name, attempts=attempt)

    async def enter(self, request: pb.EnterSaveRequest) -> pb.EnterSaveReply:
        """Adds the state that a caller contributes; answers when the cut is made.

        Raises:
            NotFound: there is no such save.
            SparserowError: the save failed.
        """
        caller, save = self._caller(request.caller), self._find(request)
        if save.phase is SavePhase.GATHERING:
            self._take(save, caller, request)
        await save.is_cut.wait()
        if save.problem is not None:
            raise save.problem
        return pb.EnterSaveReply(step=save.step)

    def _take(self, save: Save, caller: Caller, request: pb.EnterSaveRequest) -> None:
        if request.problem:
            said = one_line(request.problem, MESSAGE_CHARS)
            save.problem = Unavailable(f"another worker could not write its part of the checkpoint: {said}")
            return
        if request.HasField("state"):
            ranks = {m.ticket.worker_id: rank for rank, m in self._members(caller[0]).items()}
            save.entered[caller] = files.WorkerEntry(
                file=request.state.file,
                bytes=request.state.bytes,
                xxh3=request.state.xxh3,
                rank=ranks.get(caller[1], 0),
                worker_id=caller[1],
                epoch=caller[2],
            )
        else:
            save.entered[caller] = None
        if request.config_json:
            save.config = save.config or config_of(request.config_json)
        save.keep = save.keep or request.keep
        save.full_every = max(save.full_every, request.full_every)
        save.side_budget_bytes = save.side_budget_bytes or request.side_budget_bytes

    async def state(self, request: pb.GetSaveRequest) -> pb.GetSaveReply:
        """Returns the progress of a save; waits for its end as long as the request says.

        Raises:
            NotFound: there is no such save.
        """
        save = self._find(request)
        if request.wait_ms:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(save.is_over.wait(), request.wait_ms / 1000)
        return pb.GetSaveReply(
            phase=save.phase.value,
            problem=str(save.problem or ""),
            problem_code=save.problem.number if save.problem is not None else 0,
            rows=save.rows,
            bytes=save.bytes,
        )

    async def end(self, url: str, name: str) -> None:
        """Returns when a save is a complete checkpoint.

        Raises:
            SparserowError: the save failed.
        """
        save = self._find(pb.GetSaveRequest(url=url, name=name))
        await save.is_over.wait()
        if save.problem is not None:
            raise save.problem

    def _find(self, request: pb.EnterSaveRequest | pb.GetSaveRequest) -> Save:
        url = check_url("url", request.url)
        save = self._saves.get((url, request.name))
        if save is None:
            raise NotFound(f"save {request.name!r} to {url} is not under way, and has not just ended")
        return save

    def _caller(self, message: pb.CheckpointCaller) -> Caller:
        if message.job_id:
            self._cluster.jobs.find(message.job_id, message.worker_id, message.epoch)
        return message.job_id, message.worker_id, message.epoch

    def _members(self, job_id: int) -> dict[int, Any]:
        job = self._cluster.jobs.jobs.get(job_id)
        return job.members if job is not None else {}

    async def _run(self, save: Save) -> None:
        try:
            await self._gather(save)
            began = time.monotonic()  # the wait for workers is no part of what a save takes
            save.phase = SavePhase.CUTTING
            self._cluster.check_whole()
            loads = self._cluster.loads
            save.base = await asyncio.to_thread(find_base, save.folder, self._cluster, save.full_every)
            try:
                points, cuts = await self._operations.cut(lambda points: self._cut(save, points))
            except DeadlineExceeded:  # a late worker may owe the rest of a commit; the next save does without it
                self._wait_for(self._cluster.jobs.jobs)
                raise
            if self._cluster.loads != loads:
                raise Unavailable("rows were restored while the cut was taken; save again")
            save.step = next((point.step for point in points if point.job_id == save.job_id), -1)
            save.phase = SavePhase.WRITING
            save.is_cut.set()
            manifest = await self._write(save, points, cuts)
            await asyncio.to_thread(_put_manifest, save.folder / save.name, manifest)
            is_of_now = self._cluster.loads == loads
            if is_of_now:
                self._cluster.has_rows_in(save.folder.url, manifest, save.mark)
                self._cluster.save_took_sec = time.monotonic() - began
                self._note()
            await self._shard_calls.state_is_written()
            save.phase = SavePhase.SAVED
            log.info("%s/%s: %d rows, %d bytes", save.folder.url, save.name, manifest.rows, manifest.size)
            if save.keep and is_of_now:
                await self._prune(save)
        except NotLeader as error:  # the written state may name this checkpoint, so the next leader may need its rows
            await self._fail(save, error, remove=False)
        except SparserowError as error:
            await self._fail(save, error)
        except asyncio.CancelledError:
            await self._fail(save, Unavailable("the coordinator is stopping"), remove=False)
            raise
        except Exception as error:
            log.exception("save %s failed", save.name)
            await self._fail(save, error_of(10, f"{type(error).__name__}: {error}"))
        finally:
            self._current = None
            save.is_cut.set()
            save.is_over.set()

    async def _fail(self, save: Save, error: SparserowError, *, remove: bool = True) -> None:
        save.problem, save.phase = error, SavePhase.FAILED
        self._cluster.saves_failed += 1
        log.warning("save %s/%s failed: %s", save.folder.url, save.name, error)
        if remove:
            await self._shard_calls.end_cut(save.key)
            with contextlib.suppress(SparserowError):
                await asyncio.to_thread((save.folder / save.name).remove)

    def _known_in(self, folder: Folder) -> set[str]:
        """Returns the names that were seen with a manifest, so that an object store is asked only for new names."""
        return self._known.setdefault(folder.url, set())

    async def _prune(self, save: Save) -> None:
        try:
            for name in await asyncio.to_thread(files.prune, save.folder, save.keep, self._known_in(save.folder)):
                log.info("%s/%s is removed: %d are kept", save.folder.url, name, save.keep)
        except SparserowError as error:  # the save has succeeded all the same
            log.warning("%s: older checkpoints are not removed: %s", save.folder.url, error)

    async def _gather(self, save: Save) -> None:
        """Waits until every worker in the job has entered; a worker that leaves without entering fails the save."""
        loop = asyncio.get_running_loop()
        expected: set[Caller] = set()
        deadline = loop.time() + _GATHER_DEADLINE_SEC
        while True:
            if save.problem is not None:
                raise save.problem
            self._wait_for({save.job_id})
            members = {
                (save.job_id, member.ticket.worker_id, member.ticket.epoch)
                for member in self._members(save.job_id).values()
            }
            expected |= members
            gone = expected - members - save.entered.keys()
            if members and gone:
                ids = ", ".join(str(worker) for _, worker, _ in sorted(gone))
                raise Unavailable(f"workers {ids} left the job before they saved; save again")
            if save.job_id and not members:
                raise FailedPrecondition("all workers of the job have left before the checkpoint was made")
            if members <= save.entered.keys() and save.entered:
                return
            if loop.time() > deadline:
                missing = ", ".join(str(worker) for _, worker, _ in sorted(members - save.entered.keys()))
                raise DeadlineExceeded(
                    f"workers {missing} did not save within {_GATHER_DEADLINE_SEC:.0f} s; all workers of a job save "
                    "together"
                )
            await asyncio.sleep(_GATHER_POLL_SEC)

    async def _cut(self, save: Save, points: list[CutPoint]) -> tuple[list[CutPoint], list[pb.CutReply]]:
        save.mark = self._cluster.operations
        save.data = self._cluster.data.at_cut({point.job_id: point.steps for point in points})
        request = pb.CutRequest(
            save=save.key,
            deadline_ms=round(CUT_DEADLINE_SEC * 1000),
            side_budget_bytes=save.side_budget_bytes,
            base_url="" if save.base is None else (save.folder / save.base.manifest.name).url,
            base_slots=[
                pb.SlotsFile(
                    file=pb.WrittenFile(file=facts.file, bytes=facts.bytes, xxh3=facts.xxh3),
                    first_slot=facts.first_slot,
                    end_slot=facts.end_slot,
                )
                for facts in (save.base.manifest.slots if save.base is not None else ())
            ],
            jobs=[
                pb.CutJob(
                    job_id=point.job_id,
                    operation=point.operation,
                    step=point.step if point.staleness == 0 else -1,
                    workers=[
                        pb.CutWorker(worker_id=worker, epoch=epoch, sequence=sequence)
                        for (worker, epoch), sequence in point.sequences.items()
                    ],
                )
                for point in points
            ],
        )
        return points, await self._shard_calls.cut(request)

    async def _write(self, save: Save, points: list[CutPoint], cuts: list[pb.CutReply]) -> files.Manifest:
        written = WrittenFiles(save, self._cluster)
        await all_of(self._dump(save, shard, written) for shard in self._cluster.shards.shards)
        return written.manifest(points, cuts)

    async def _dump(self, save: Save, shard: Shard, written: WrittenFiles) -> None:
        request = pb.DumpRequest(save=save.key, url=(save.folder / save.name).url, part_bytes=PART_BYTES)
        async for reply in self._shard_calls.stream(shard, "Dump", request):
            written.add(shard, reply)


def _put_manifest(folder: Folder, manifest: files.Manifest) -> None:
    """Turns the written files into a checkpoint, after checking that all are there."""
    files.check_written(folder, manifest)
    folder.put(files.FILE, manifest.to_bytes())


def config_of(text: str) -> Any:
    """Returns the configuration of a job, which the manifest repeats; raises InvalidArgument when it is not JSON."""
    try:
        return parse_json(text.encode(), "config_json", _MOST_CONFIG_BYTES)
    except DataLoss as error:
        raise InvalidArgument(str(error)) from None
