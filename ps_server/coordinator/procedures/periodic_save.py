"""Saves rows periodically while a job runs, so that a shard that ends can be restored from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ....proto import control_pb2 as pb
from ....proto.checkpoint.folder import Folder
from ....proto.errors import ResourceExhausted, SparserowError, Unavailable, not_allowed
from ..state.cluster import Cluster
from .checkpoint_save import CheckpointSaves, config_of
from .membership_change import CUT_DEADLINE_SEC

log = logging.getLogger(__name__)

# Apart from this number, a save holds all rows when the changes since the last full save are as large as it was.
_FULL_EVERY = 1 << 20
_KEEP = 2
_LONGEST_SEC = 86400.0
_MOST_FOLDERS = 16  # folders of a job; the coordinator's state has a configuration for each


def _pause_after_failure(every_sec: float, took_sec: float) -> float:
    """Returns the seconds from the end of a failed save to the next one.

    A save that fails at its cut has frozen the jobs until then, at most for the cut's deadline. Workers get as much
    time before the next freeze; otherwise a cut that fails each time would leave them none.
    """
    return max(every_sec - took_sec, min(took_sec, CUT_DEADLINE_SEC))


class PeriodicSaves:
    """Series of saves, one for each folder. It belongs to one event loop.

    A series continues when the coordinator is restarted, because the state of the cluster has it.

    Args:
        cluster: the cluster whose jobs run.
        saves: makes the saves.
        note: saves the state of the cluster.
    """

    def __init__(self, cluster: Cluster, saves: CheckpointSaves, note: Callable[[], None]) -> None:
        self._cluster = cluster
        self._saves = saves
        self._note = note
        self._tasks: dict[str, asyncio.Task[None]] = {}  # the task of each series, by URL

    def go_on(self) -> None:
        """Starts the series again that a previous coordinator made; called within the event loop."""
        for url in self._cluster.row_saves:
            self._begin(url)

    async def close(self) -> None:
        """Cancels all series."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def keep(self, request: pb.KeepRowsRequest) -> None:
        """Begins a series, which runs while a job that asked for it runs, at the shortest interval that a job asked
        for.

        The call is harmless when another worker has begun the series.

        Raises:
            InvalidArgument, FailedPrecondition: the URL is not allowed here, the interval is out of range, or the
                configuration is not JSON.
            ResourceExhausted: the job's rows are saved in the largest allowed number of folders.
            Fenced: the caller is not a worker of its job.
        """
        caller = request.caller
        self._cluster.jobs.find(caller.job_id, caller.worker_id, caller.epoch)
        if not 0 < request.every_sec <= _LONGEST_SEC:
            raise not_allowed("every_sec", request.every_sec, f"(0, {_LONGEST_SEC:g}]")
        url = self._cluster.checkpoint_roots.check(request.url)
        await asyncio.to_thread(Folder, url)  # raises when the scheme is unknown
        if request.config_json:
            config_of(request.config_json)  # raises here instead of in each save
        self._check_folders(caller.job_id, url)
        jobs = self._cluster.row_saves.setdefault(url, {})
        # A later run of a job replaces the configuration; workers of one run send the same one.
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
                f"url: {url} is one folder too many: the job's rows are saved in {others} folders already; allowed: at "
                f"most {_MOST_FOLDERS}"
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
                is_soon_again = isinstance(error, Unavailable)  # a worker joined or left, or a shard is away
                log.log(logging.INFO if is_soon_again else logging.WARNING, "rows are not saved to %s: %s", url, error)
                took_sec = loop.time() - began
                await asyncio.sleep(_pause_after_failure(min(1.0, every_sec) if is_soon_again else every_sec, took_sec))
            else:
                await asyncio.sleep(max(0.0, began + every_sec - loop.time()))
        self._cluster.row_configs.pop(url, None)
        self._cluster.row_saves.pop(url, None)  # saved with the next change; a series without a job ends at once

    async def _save(self, url: str) -> None:
        name = (await self._saves.begin(pb.BeginSaveRequest(url=url))).name
        config = self._cluster.row_configs.get(url, "")
        entry = pb.EnterSaveRequest(url=url, name=name, keep=_KEEP, full_every=_FULL_EVERY, config_json=config)
        await self._saves.enter(entry)
        await self._saves.end(url, name)
