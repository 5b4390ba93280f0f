"""Rows saved over and over while a job goes on: what a shard that ends comes back from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ....proto import control_pb2 as pb
from ....proto.checkpoint.folder import Folder
from ....proto.errors import InvalidArgument, ResourceExhausted, SparserowError, Unavailable
from ..state.cluster import Cluster
from .checkpoint_save import CheckpointSaves, config_of
from .membership_change import CUT_DEADLINE_SEC

log = logging.getLogger(__name__)

# A save holds all rows when what changed since the last such one weighs as much, whatever this number is.
_FULL_EVERY = 1 << 20
_KEEP = 2
_LONGEST_SEC = 86400.0
_MOST_FOLDERS = 16  # of a job, each with its configuration in the coordinator's state


def _pause_after_failure(every_sec: float, took_sec: float) -> float:
    """Seconds from the end of a failed save to the next one.

    A save that fails at its cut has frozen the jobs for as long as it took, up to the cut's deadline. Workers get as
    much time before the next freeze: otherwise a cut that fails each time would leave them none.
    """
    return max(every_sec - took_sec, min(took_sec, CUT_DEADLINE_SEC))


class PeriodicSaves:
    """One series of saves by folder. Belongs to one event loop.

    Args:
        cluster: whose jobs are looked at.
        saves: makes them.
        note: puts the cluster on disk.

    A series goes on when the coordinator is started again: the cluster knows of it.
    """

    def __init__(self, cluster: Cluster, saves: CheckpointSaves, note: Callable[[], None]) -> None:
        self._cluster = cluster
        self._saves = saves
        self._note = note
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by URL

    def go_on(self) -> None:
        """Begins again the series that the coordinator made before it was started again; within the event loop."""
        for url in self._cluster.row_saves:
            self._begin(url)

    async def close(self) -> None:
        """Ends all of them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def keep(self, request: pb.KeepRowsRequest) -> None:
        """Begins a series, which goes on as long as one of the jobs that asked for it, as often as one of them wants;
        harmless when another worker has begun it.

        Raises:
            InvalidArgument, FailedPrecondition: the URL is not allowed here, a time out of range, or the configuration
                no JSON.
            ResourceExhausted: the job's rows are saved in as many folders as are allowed.
            Fenced: the caller is no worker of its job.
        """
        caller = request.caller
        self._cluster.jobs.find(caller.job_id, caller.worker_id, caller.epoch)
        if not 0 < request.every_sec <= _LONGEST_SEC:
            raise InvalidArgument(f"every_sec: {request.every_sec:g} is not allowed; allowed: (0, {_LONGEST_SEC:g}]")
        url = self._cluster.checkpoint_roots.check(request.url)
        await asyncio.to_thread(Folder, url)  # it says that a scheme is unknown
        if request.config_json:
            config_of(request.config_json)  # it is refused here, and not by each save
        self._check_folders(caller.job_id, url)
        jobs = self._cluster.row_saves.setdefault(url, {})
        # A later run of a job takes the series over; workers of one run send the same configuration.
        is_other_run = request.config_json not in ("", self._cluster.row_configs.get(url, ""))
        if is_other_run:
            self._cluster.row_configs[url] = request.config_json
        is_first = caller.job_id not in jobs
        jobs.setdefault(caller.job_id, request.every_sec)
        if is_first or is_other_run:
            self._note()
        running = self._tasks.get(url)
        if running is None or running.done():
            self._begin(url)

    def _begin(self, url: str) -> None:
        self._tasks[url] = asyncio.get_running_loop().create_task(self._run(url))

    def _check_folders(self, job_id: int, url: str) -> None:
        others = sum(job_id in jobs for asked, jobs in self._cluster.row_saves.items() if asked != url)
        if others >= _MOST_FOLDERS:
            raise ResourceExhausted(
                f"url: the job has rows saved in {others} folders; allowed: at most {_MOST_FOLDERS}, {url} is one more"
            )

    async def _run(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            jobs = self._cluster.row_saves[url]
            for ended in [job for job in jobs if job not in self._cluster.jobs.jobs]:
                del jobs[ended]
            if not jobs:
                break
            began, every_sec = loop.time(), min(jobs.values())
            try:
                await self._save(url)
            except SparserowError as error:
                is_soon_again = isinstance(error, Unavailable)  # a worker came or went, or a shard is away
                log.log(logging.INFO if is_soon_again else logging.WARNING, "rows are not saved to %s: %s", url, error)
                took_sec = loop.time() - began
                await asyncio.sleep(_pause_after_failure(min(1.0, every_sec) if is_soon_again else every_sec, took_sec))
            else:
                await asyncio.sleep(max(0.0, began + every_sec - loop.time()))
        self._cluster.row_configs.pop(url, None)
        self._cluster.row_saves.pop(url, None)  # noted with the next change; a series without a job ends at once

    async def _save(self, url: str) -> None:
        name = (await self._saves.begin(pb.BeginSaveRequest(url=url))).name
        config = self._cluster.row_configs.get(url, "")
        entry = pb.EnterSaveRequest(url=url, name=name, keep=_KEEP, full_every=_FULL_EVERY, config_json=config)
        await self._saves.enter(entry)
        await self._saves.end(url, name)
