"""Restores a single shard that ended, while the other shards and the workers of jobs without barrier continue.

Another process replaces the ended one, loads the rows of the newest checkpoint, and then serves
(docs/internals/consistency.md, rules 15 and 17).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from ....proto import control_pb2 as pb
from ....proto.checkpoint import manifest as files
from ....proto.checkpoint.folder import Folder
from ....proto.errors import DeadlineExceeded, FailedPrecondition, SparserowError, Unavailable
from ....proto.schema_message import message_of_schema
from ..state.cluster import Cluster
from ..state.shards import Shard
from .restore_plan import rows_differ
from .shard_calls import ShardCalls

log = logging.getLogger(__name__)


class ShardRecoveries:
    """Restores single shards, one at a time. It belongs to one event loop.

    Attributes:
        failure: why the last recovery failed; empty when it succeeded.
    """

    def __init__(
        self, cluster: Cluster, shard_calls: ShardCalls, tables_lock: asyncio.Lock, save: Callable[[], None]
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
        if cluster.damage is not None:
            return ""  # it has no rows to lose, and a restore gives it all rows
        if cluster.rows_checkpoint is None:
            return "no checkpoint has the rows of this cluster"
        if barrier := self._barrier():
            return f"job {barrier} is synchronous: its workers and all shards have to be restored together"
        return self.failure if any(shard.restoring for shard in cluster.shards.shards) else ""

    def passes(self) -> bool:
        """Whether :meth:`problem` ends by itself, with the end of a job."""
        return self._cluster.rows_checkpoint is not None and bool(self._barrier())

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
            self.failure = f"shard {shard.index} cannot be restored: {error}"
            log.error("%s", self.failure)
        except Exception as error:
            self.failure = f"shard {shard.index} cannot be restored: {type(error).__name__}: {error}"
            log.exception("shard %d", shard.index)
        finally:
            del self._tasks[instance]

    async def _recover(self, shard: Shard, instance: int) -> None:
        cluster = self._cluster
        if cluster.rows_checkpoint is None:
            raise FailedPrecondition("no checkpoint has the rows of this cluster")
        url, name = cluster.rows_checkpoint
        folder = await asyncio.to_thread(Folder, cluster.checkpoint_roots.check(url))
        began = asyncio.get_running_loop().time()
        async with self._tables_lock:
            _check_held(shard, instance)
            if not shard.restoring:
                return  # a restore of all tables has loaded its rows
            manifest = await asyncio.to_thread(files.read_manifest, folder, name)
            if manifest.slot_count != cluster.slots.slot_count:
                raise FailedPrecondition(f"{name} is of a cluster with {manifest.slot_count} slots")
            request = pb.LoadRequest(
                url=folder.url,
                lineage=shard.lineage,
                name=manifest.name,
                tables=self._tables(manifest, shard),
                windows_json=json.dumps(self._windows(manifest, shard)),
                route=self._shard_calls.route_message(),
            )
            loaded = pb.LoadReply()
            async for reply in self._shard_calls.stream(shard, "Load", request):
                loaded = reply
            _check_held(shard, instance)
            # Saved before the shard serves: a restarted coordinator must not restore it a second time.
            shard.restoring = False
            shard.restores += 1
            self._save()
            await self._shard_calls.catch_up(shard)
        log.warning(
            "shard %d is back after %.1f s: %d rows of %s/%s, which was begun %s s before. Commits to it since then "
            "are lost, except for those that workers still hold",
            shard.index,
            asyncio.get_running_loop().time() - began,
            loaded.rows,
            folder.url,
            manifest.name,
            _age_of(manifest),
        )

    def _tables(self, manifest: files.Manifest, shard: Shard) -> list[pb.LoadTable]:
        """Returns the present tables to load; a table that the checkpoint lacks is loaded without rows."""
        saved = {table.schema.id: table.schema for table in manifest.tables}
        tables = []
        for schema in self._cluster.registry.tables():
            is_empty = schema.id not in saved or rows_differ(schema, saved[schema.id])
            if is_empty:
                log.warning(
                    "table %s is not in %s: it is empty on shard %d", schema.full_name, manifest.name, shard.index
                )
            message = message_of_schema(schema)
            tables.append(pb.LoadTable(schema=message, saved_table_id=schema.id, without_rows=is_empty))
        return tables

    def _windows(self, manifest: files.Manifest, shard: Shard) -> list[dict[str, Any]]:
        """Returns what the checkpoint knows of the commits that this shard had accepted, by job."""
        same_shards = manifest.cluster_id == self._cluster.cluster_id and manifest.shards == len(
            self._cluster.shards.shards
        )
        saved = {(job.job_id, job.generation): job.windows for job in manifest.jobs if same_shards}
        windows: list[dict[str, Any]] = []
        for job_id, roster in self._cluster.rosters.items():
            of_shards = saved.get((job_id, roster.generation))
            known: dict[str, Any] = {"completed": -1, "workers": []} if of_shards is None else of_shards[shard.index]
            windows.append({**known, "job_id": job_id, "generation": roster.generation, "lossy": True})
        return windows


def _check_held(shard: Shard, instance: int) -> None:
    """Raises Unavailable when another process has replaced the one that is restored, because it has no rows yet."""
    if shard.instance != instance:
        raise Unavailable("another process has replaced the process that was being restored")


def _age_of(manifest: files.Manifest) -> str:
    try:
        made = datetime.fromisoformat(manifest.created)
    except ValueError:
        return "?"
    return f"{(datetime.now(timezone.utc) - made).total_seconds():.0f}"
