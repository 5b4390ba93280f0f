"""Restores a single shard that ended, while the other shards and the workers of jobs without barrier continue.

Another process replaces the ended one, loads the rows of the newest checkpoint, and then serves
(docs/internals/consistency.md, rules 15 and 17).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ....proto import control_pb2 as pb
from ....proto.checkpoint import manifest as files
from ....proto.checkpoint.accepted import changes
from ....proto.checkpoint.folder import Folder
from ....proto.errors import DataLoss, DeadlineExceeded, FailedPrecondition, SparserowError, Unavailable
from ....proto.schema import TableSchema
from ....proto.schema_message import message_of_schema
from ..state.cluster import Cluster
from ..state.departed_workers import DepartedWorker
from ..state.row_sources import RowSource
from ..state.shards import Shard
from .shard_calls import ShardCalls
from .turn_lock import TurnLock

log = logging.getLogger(__name__)


class ShardRecoveries:
    """Restores single shards, one at a time. It belongs to one event loop.

    Attributes:
        failure: why the last recovery failed; empty when it succeeded.
    """

    def __init__(
        self, cluster: Cluster, shard_calls: ShardCalls, tables_lock: TurnLock, save: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._shard_calls = shard_calls
        self._tables_lock = tables_lock
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by instance of the restored process
        self._save = save
        self.failure = ""

    @property
    def done(self) -> int:
        """The number of recoveries that succeeded."""
        return sum(shard.restores for shard in self._cluster.shards.shards)

    async def close(self) -> None:
        """Cancels the recoveries that are under way."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def problem(self) -> str:
        """Returns why a shard that has ended cannot be restored alone now; empty when it can."""
        cluster = self._cluster
        if cluster.awaits_restore:
            return ""  # it has no rows to lose, and a restore gives it all rows
        if missing := _without_checkpoint(cluster):
            return missing
        if barrier := self._barrier():
            return f"job {barrier} is synchronous: its workers and all shards have to be restored together"
        return self.failure if any(shard.restoring for shard in cluster.shards.shards) else ""

    def passes(self) -> bool:
        """Whether :meth:`problem` ends by itself, with the end of a job."""
        return not _without_checkpoint(self._cluster) and bool(self._barrier())

    def _barrier(self) -> str:
        """Returns the name of a synchronous job; empty when there is none."""
        jobs = self._cluster.jobs.jobs.values()
        return next((job.full_name for job in jobs if job.terms.staleness == 0), "")

    def begin(self, shard: Shard) -> None:
        """Restores a shard that has registered, and lets it serve; the call is harmless when that is under way."""
        if shard.instance in self._tasks:
            return
        self._tasks[shard.instance] = asyncio.get_running_loop().create_task(self._run(shard, shard.instance))

    async def _run(self, shard: Shard, instance: int) -> None:
        try:
            await self._recover(shard, instance)
            self.failure = ""
        except (
            Unavailable,
            DeadlineExceeded,
        ) as error:  # the shard ended again, or is slow; its next heartbeat tries again
            log.warning("shard %d is not restored yet: %s", shard.index, error)
        except SparserowError as error:
            if isinstance(error, DataLoss):
                await asyncio.to_thread(self._note_damage, error)
            self.failure = f"shard {shard.index} cannot be restored: {error}"
            log.error("%s", self.failure)
        except Exception as error:
            self.failure = f"shard {shard.index} cannot be restored: {type(error).__name__}: {error}"
            log.exception("shard %d", shard.index)
        finally:
            del self._tasks[instance]

    def _note_damage(self, error: DataLoss) -> None:
        with suppress(SparserowError):
            for url, name in self._sources():
                folder = Folder(self._cluster.checkpoint_roots.check(url))
                files.note_damage(folder, files.read_chain(folder, name), error)

    async def _recover(self, shard: Shard, instance: int) -> None:
        cluster = self._cluster
        if missing := _without_checkpoint(cluster):
            raise FailedPrecondition(missing)
        began = asyncio.get_running_loop().time()
        rows = 0
        async with self._tables_lock:
            _check_held(shard, instance)
            if not shard.restoring:
                return  # a restore of all tables has loaded its rows
            checkpoints = [await self._checkpoint(*source) for source in self._sources()]
            for number, checkpoint in enumerate(checkpoints):
                is_last = number == len(checkpoints) - 1
                request = pb.LoadRequest(
                    url=checkpoint.folder.url,
                    lineage=shard.lineage,
                    name=checkpoint.manifest.name,
                    tables=self._tables(checkpoint, shard, with_damaged=number == 0),
                    windows_json=json.dumps(self._windows(checkpoints, shard)) if is_last else "",
                    route=self._shard_calls.route_message(),
                    in_place=number > 0,
                )
                loaded = pb.LoadReply()
                async for reply in self._shard_calls.stream(shard, "Load", request):
                    loaded = reply
                rows += loaded.rows
            _check_held(shard, instance)
            # Saved before the shard serves: a restarted coordinator must not restore it a second time.
            shard.restoring = False
            shard.restores += 1
            cluster.note_returned(shard.index, lambda worker: _taken(checkpoints, shard.index, worker))
            self._save()
            await self._shard_calls.catch_up(shard)
        log.warning(
            "shard %d is back after %.1f s: %d rows of %s. Commits to it since then are lost, except for those that "
            "workers still hold",
            shard.index,
            asyncio.get_running_loop().time() - began,
            rows,
            " and ".join(map(str, checkpoints)),
        )

    def _sources(self) -> list[tuple[str, str]]:
        """Returns the URL and the name of each checkpoint that has rows of present tables, the newest save first."""
        cluster = self._cluster
        ids = {schema.id for schema in cluster.registry.tables()}
        restored = [(each.url, each.name) for id_, each in cluster.row_sources.items() if id_ in ids]
        whole = [cluster.rows_checkpoint] if cluster.rows_checkpoint is not None else []
        return list(dict.fromkeys([*whole, *restored]))

    async def _checkpoint(self, url: str, name: str) -> _Checkpoint:
        cluster = self._cluster
        folder = await asyncio.to_thread(Folder, cluster.checkpoint_roots.check(url))
        manifest = await asyncio.to_thread(files.read_manifest, folder, name)
        if manifest.slot_count != cluster.slots.slot_count:
            raise FailedPrecondition(f"{name} is of a cluster with {manifest.slot_count} slots")
        return _Checkpoint(url, folder, manifest)

    def _source_of(self, schema: TableSchema) -> RowSource | None:
        """Returns where the rows of a table are; None when the table is damaged, so that a restore has to give them."""
        cluster = self._cluster
        if cluster.damage is not None and schema.id in cluster.damage.table_ids:
            return None
        if cluster.rows_checkpoint is None:
            return cluster.row_sources.get(schema.id)
        return cluster.row_sources.get(schema.id, RowSource(*cluster.rows_checkpoint, schema.id))

    def _tables(self, checkpoint: _Checkpoint, shard: Shard, *, with_damaged: bool) -> list[pb.LoadTable]:
        """Returns the present tables to load from a checkpoint; a table that it lacks is loaded without rows."""
        saved = {table.schema.id: table.schema for table in checkpoint.manifest.tables}
        tables = []
        for schema in self._cluster.registry.tables():
            source = self._source_of(schema)
            message = message_of_schema(schema)
            if source is None:
                if with_damaged:
                    tables.append(pb.LoadTable(schema=message, saved_table_id=schema.id, without_rows=True))
                continue
            if not checkpoint.has(source):
                continue
            then = saved.get(source.saved_table_id)
            is_empty = then is None or not {key for key, *_ in changes(schema, then)} <= set(source.changed)
            if is_empty:
                name = checkpoint.manifest.name
                log.warning("table %s is not in %s: it is empty on shard %d", schema.full_name, name, shard.index)
            tables.append(
                pb.LoadTable(
                    schema=message,
                    saved_table_id=source.saved_table_id,
                    changed=source.changed,
                    without_rows=is_empty,
                )
            )
        return tables

    def _windows(self, checkpoints: list[_Checkpoint], shard: Shard) -> list[dict[str, Any]]:
        """Returns what the checkpoints know of the commits that this shard had accepted, by job."""
        cluster = self._cluster
        saved = [
            {(job.job_id, job.generation): job.windows for job in each.manifest.jobs}
            for each in checkpoints
            if each.manifest.cluster_id == cluster.cluster_id and each.manifest.shards == len(cluster.shards.shards)
        ]
        windows: list[dict[str, Any]] = []
        for job_id, roster in cluster.rosters.items():
            # A restore begins a generation of its job, which no other checkpoint of before it knows.
            of_shards = next((of[key] for of in saved if (key := (job_id, roster.generation)) in of), None)
            known: dict[str, Any] = {"completed": -1, "workers": []} if of_shards is None else of_shards[shard.index]
            windows.append({**known, "job_id": job_id, "generation": roster.generation, "lossy": True})
        return windows


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint that a shard gets rows of.

    Attributes:
        url: the URL of the folder of checkpoints, as it was noted.
        folder: that folder.
        manifest: the manifest of the checkpoint.
    """

    url: str
    folder: Folder
    manifest: files.Manifest

    def has(self, source: RowSource) -> bool:
        """Whether these are the rows that a table was restored from."""
        return (source.url, source.name) == (self.url, self.manifest.name)

    def __str__(self) -> str:
        return f"{self.folder.url}/{self.manifest.name}, which was begun {_age_of(self.manifest)} s before"


def _taken(checkpoints: list[_Checkpoint], shard: int, worker: DepartedWorker) -> int:
    """Returns how many commits and writes of a worker the newest checkpoint of its clock has for a shard."""
    for checkpoint in checkpoints:
        for job in checkpoint.manifest.jobs:
            if (job.job_id, job.generation) != (worker.job_id, worker.generation) or shard >= len(job.windows):
                continue
            for window in job.windows[shard]["workers"]:
                if (window["worker_id"], window["epoch"]) == (worker.worker_id, worker.epoch):
                    return int(window["steps_taken"]) + int(window["writes_taken"])
    return 0


def _without_checkpoint(cluster: Cluster) -> str:
    """Returns what to say when no checkpoint has the rows of a table; empty when each has some."""
    missing = cluster.unsaved_tables()
    if not missing and (cluster.rows_checkpoint is not None or cluster.row_sources):
        return ""
    if not cluster.row_sources:
        return "no checkpoint has the rows of this cluster"
    return f"no checkpoint has the rows of {', '.join(missing)}"


def _check_held(shard: Shard, instance: int) -> None:
    """Raises Unavailable when another process has replaced the one that is restored, because it has no rows yet."""
    if shard.instance != instance:
        raise Unavailable("another process has replaced the process that was being restored")


def _age_of(manifest: files.Manifest) -> str:
    try:
        made = datetime.fromisoformat(manifest.created)
    except ValueError:
        return "?"
    return f"{(datetime.now(UTC) - made).total_seconds():.0f}"
