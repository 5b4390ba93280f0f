"""Restores: all shards load a checkpoint together, whatever number of shards wrote it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ....proto import control_pb2 as pb
from ....proto.checkpoint import manifest as files
from ....proto.checkpoint.folder import Folder
from ....proto.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    SparserowError,
    Unavailable,
    error_of,
    not_allowed,
)
from ....proto.security.security import process_security
from ..state.cluster import Cluster
from ..state.damage import Damage
from ..state.shards import Shard, ShardPhase
from .membership_change import JobOperations
from .restore_plan import forget_tables, plan_restore
from .shard_calls import ShardCalls
from .shard_loads import ShardLoads
from .turn_lock import TurnLock

log = logging.getLogger(__name__)

_GATHER_DEADLINE_SEC = 600.0
_GATHER_POLL_SEC = 0.02
_READY_DEADLINE_SEC = 120.0  # time for the shards to serve, when a restarted coordinator continues
_MOST_LINEAGES = (1 << 16) - 1


@dataclass
class _Restore:
    """One restore that the workers of a job request together."""

    request: pb.RestoreRequest
    entered: set[tuple[int, int]] = field(default_factory=set)  # (worker id, epoch)
    next_step: int = 0  # of the session that is furthest ahead
    done: asyncio.Future[pb.RestoreReply] | None = None
    is_loading: bool = False
    namespace: str = ""  # that is restored; empty: all
    is_begun_anew: bool = False  # whether a restarted coordinator began it again


class CheckpointRestores:
    """Restores a cluster, one restore at a time. It belongs to one event loop.

    Args:
        cluster: the cluster whose rows are restored.
        shard_calls: the connections to the shards.
        operations: freezes the job whose rows are restored.
        save: saves the state of the cluster.
        tables_lock: the lock that is held while tables are created or dropped.
        wait_for: ends the leases of late workers of jobs, for which something waits.
    """

    def __init__(
        self,
        cluster: Cluster,
        shard_calls: ShardCalls,
        operations: JobOperations,
        save: Callable[[], None],
        tables_lock: TurnLock,
        wait_for: Callable[[Collection[int]], None],
    ) -> None:
        self._cluster = cluster
        self._shard_calls = shard_calls
        self._operations = operations
        self._save = save
        self._tables_lock = tables_lock
        self._wait_for = wait_for
        self._current: _Restore | None = None
        self._failed: tuple[int, int, SparserowError] | None = None  # the job and the attempt of the last that failed
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancels a restore that is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def go_on(self) -> None:
        """Continues the restore that was under way when the coordinator ended; called within the event loop.

        A restore without a job begins again, with the shards that register. The workers of a job have to request it
        again.
        """
        damage = self._cluster.damage
        if damage is None or damage.failure:
            return
        if damage.request is None:
            damage.failure = "the coordinator ended before all rows were loaded"
            log.error("%s", damage.text)
            self._save()
        else:
            log.warning("the restore of %s begins again", damage.source)
            self._begin(_Restore(damage.request, is_begun_anew=True))

    def _begin(self, restore: _Restore) -> _Restore:
        self._current = restore
        restore.done = asyncio.get_running_loop().create_future()
        task = asyncio.get_running_loop().create_task(self._run(restore))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return restore

    async def _until_ready(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _READY_DEADLINE_SEC
        while self._cluster.shards.problem() and loop.time() < deadline:
            await asyncio.sleep(_GATHER_POLL_SEC)

    async def restore(self, request: pb.RestoreRequest) -> pb.RestoreReply:
        """Restores a checkpoint; answers when all workers of the caller's job have called, and all shards have their
        rows.

        Raises:
            InvalidArgument: the URL is never allowed.
            FailedPrecondition: this cluster does not allow the URL, another job is running, or the checkpoint does not
                fit its tables.
            NotFound, DataLoss: the checkpoint, or a file of it, is missing or damaged.
            SparserowError: a shard cannot be reached, or has no room.
        """
        caller = request.caller
        if caller.job_id:
            self._cluster.jobs.find(caller.job_id, caller.worker_id, caller.epoch)
        self._cluster.checkpoint_roots.check(request.url)
        current = self._current
        self._check_not_late(caller)
        while current is not None and caller.job_id and current.request.caller.job_id not in (0, caller.job_id):
            assert current.done is not None
            await asyncio.wait({current.done})  # jobs of several namespaces are restored one after the other
            current = self._current
        self._check_not_late(caller)
        if current is None:
            current = self._begin(_Restore(request))
            if (job := self._cluster.jobs.jobs.get(caller.job_id)) is not None:
                job.restores_begun = caller.attempt
        elif (current.is_loading and caller.job_id) or not _is_same(current.request, request):
            raise FailedPrecondition("another restore of this cluster is under way")
        current.entered.add((caller.worker_id, caller.epoch))
        current.next_step = max(current.next_step, request.next_step)
        assert current.done is not None
        return await asyncio.shield(current.done)

    def _check_not_late(self, caller: pb.CheckpointCaller) -> None:
        """Has a worker that comes late to an attempt of its job get the end of it, and begin no other one."""
        if not caller.job_id:
            return
        if not caller.attempt:
            raise not_allowed("caller.attempt", caller.attempt, ">= 1 of a worker")
        self._cluster.jobs.find(caller.job_id, caller.worker_id, caller.epoch)
        job, current = self._cluster.jobs.jobs[caller.job_id], self._current
        is_under_way = current is not None and current.request.caller.job_id == caller.job_id
        if caller.attempt > job.restores_begun or (is_under_way and caller.attempt == job.restores_begun):
            return
        if self._failed is not None and self._failed[:2] == (caller.job_id, caller.attempt):
            raise error_of(self._failed[2].number, str(self._failed[2]))
        raise Unavailable(f"restore {caller.attempt} of the job has ended without this worker; restore again")

    async def _run(self, restore: _Restore) -> None:
        assert restore.done is not None
        try:
            restore.namespace = await self._scope(restore.request)
            await (self._until_ready() if restore.is_begun_anew else self._gather(restore))
            restore.is_loading = True
            reply = await self._load(restore)
            restore.done.set_result(reply)
        except SparserowError as error:
            await self._note_failure(str(error))
            self._failed = (restore.request.caller.job_id, restore.request.caller.attempt, error)
            restore.done.set_exception(error)
        except asyncio.CancelledError:
            restore.done.cancel()
            raise
        except Exception as error:
            log.exception("restore failed")
            await self._note_failure(f"{type(error).__name__}: {error}")
            restore.done.set_exception(Internal(f"{type(error).__name__}: {error}"))
        finally:
            self._current = None
            if restore.done.done() and not restore.done.cancelled():
                restore.done.exception()  # marks the error as seen, because its callers may have gone

    async def _gather(self, restore: _Restore) -> None:
        job_id, namespace = restore.request.caller.job_id, restore.namespace
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _GATHER_DEADLINE_SEC
        while True:
            jobs = self._cluster.jobs.jobs
            self._wait_for([job.job_id for job in self._cluster.jobs.in_namespace(namespace)])
            others = [job.full_name for job in self._cluster.jobs.in_namespace(namespace) if job.job_id != job_id]
            if others:
                where = f"namespace {namespace}" if namespace else "this cluster, of which every namespace is restored"
                raise FailedPrecondition(
                    f"restore: jobs {', '.join(sorted(others))} are running on {where}; stop them first"
                )
            job = jobs.get(job_id)
            if job_id and job is None:
                raise Unavailable("restore: all workers of the job have left before it began; nothing was changed")
            members = {(m.ticket.worker_id, m.ticket.epoch) for m in job.members.values()} if job is not None else set()
            if members <= restore.entered:
                await self._operations.settle_ended()
                return
            if loop.time() > deadline:
                missing = ", ".join(str(worker) for worker, _ in sorted(members - restore.entered))
                raise DeadlineExceeded(
                    f"restore: workers {missing} did not call it; all workers of a job have to call it"
                )
            await asyncio.sleep(_GATHER_POLL_SEC)

    async def _scope(self, request: pb.RestoreRequest) -> str:
        """Returns the namespace to restore; empty for all, as a cluster or a shard without rows needs."""
        cluster, namespace = self._cluster, str(request.namespace)
        if not namespace or request.tables or request.renames:
            return namespace
        if cluster.is_lost or any(map(_waits_for_rows, cluster.shards.shards)):
            return ""
        if any(job.namespace != namespace for job in cluster.jobs.jobs.values()):
            return namespace
        self._check_shards()
        return namespace if await self._has_rows({schema.id for schema in cluster.registry.tables()}) else ""

    async def _load(self, restore: _Restore) -> pb.RestoreReply:
        request = restore.request
        self._check_shards()
        folder = await asyncio.to_thread(Folder, self._cluster.checkpoint_roots.check(request.url))
        chain = await asyncio.to_thread(files.read_chain, folder, request.name or None)
        try:
            return await self._load_chain(restore, folder, chain)
        except DataLoss as error:
            await asyncio.to_thread(files.note_damage, folder, chain, error)
            raise

    async def _load_chain(self, restore: _Restore, folder: Folder, chain: list[files.Manifest]) -> pb.RestoreReply:
        cluster, request, manifest = self._cluster, restore.request, chain[-1]
        if manifest.slot_count != cluster.slots.slot_count:
            raise FailedPrecondition(
                f"restore: {manifest.name} is of a cluster with {manifest.slot_count} slots, this one has "
                f"{cluster.slots.slot_count}; start it with --slot-count={manifest.slot_count}"
            )
        await asyncio.to_thread(_check_sizes, folder, chain)
        async with self._tables_lock:
            plan = plan_restore(manifest, request, cluster.registry, restore.namespace)
            is_of_all = plan.table_ids.issuperset(schema.id for schema in cluster.registry.tables())
            load = pb.LoadRequest(url=folder.url, name=manifest.name, tables=plan.tables, in_place=not is_of_all)
            loads = ShardLoads(cluster, self._shard_calls, load, may_begin_anew=is_of_all)
            repeated = _request_to_repeat(request, manifest.name)
            damage = Damage(f"{folder.url}/{manifest.name}", plan.table_ids, request=repeated)
            try:
                for name in {table.schema.namespace for table in plan.tables if table.schema.id in plan.made}:
                    process_security().quotas.check_tables(name, cluster.registry.table_count(name))
                if cluster.damage is None and await self._has_rows(plan.table_ids):
                    await loads.verify()
                if not is_of_all:
                    cluster.check_ready()  # a shard that waits for all of its rows needs a restore of all tables
                source, has_rows = cluster.rows_checkpoint, not any(map(_waits_for_rows, cluster.shards.shards))
                before = await self._begin_damage(damage, manifest, is_of_all=is_of_all)
            except BaseException:
                forget_tables(cluster.registry, plan.made)
                raise
            try:
                await self._let_in(loads)
                next_step = max(restore.next_step, manifest.step + 1)
                job_id = request.caller.job_id
                if job_id:
                    await self._operations.restart(job_id, next_step, loads.load)
                    if (running := cluster.jobs.jobs.get(job_id)) is not None:  # the job may have ended meanwhile
                        saved = next((job.data for job in manifest.jobs if job.job_id == job_id), {})
                        cluster.data.restore(job_id, running.generation, {} if request.other_data else saved)
                else:
                    await loads.load("[]")
            except SparserowError:
                if has_rows and not loads.has_begun:  # the job has ended, say; no table was emptied
                    await self._take_damage_back(before, source)
                    forget_tables(cluster.registry, plan.made)
                raise
            loads.check_loaded()
            cluster.damage = None if before is None else before.without(plan.table_ids)
            is_as_saved = not any(table.changed for table in plan.tables)
            if is_of_all and is_as_saved and not (request.tables or request.renames):
                cluster.has_rows_in(folder.url, manifest)
            else:
                cluster.restored_from(folder.url, manifest.name, plan.tables)
                if request.namespace and not request.tables:
                    cluster.departed.restored(request.namespace)
                    cluster.lost.restored(request.namespace)
            try:
                self._save()
            except SparserowError:
                cluster.damage = damage
                raise
            await self._send_refusal()
        if not request.tables:
            await self._note_read_whole(folder, manifest.name)
        spaces = sorted({table.schema.namespace for table in plan.tables})
        log.info("restored %s: %d rows of %s", damage.source, loads.rows, ", ".join(spaces) or "no namespace")
        return pb.RestoreReply(
            name=manifest.name,
            step=manifest.step,
            rows=loads.rows,
            bytes=sum(each.size for each in chain),
            next_step=next_step,
            namespaces=spaces,
        )

    def _check_shards(self) -> None:
        """Raises Unavailable unless every shard serves, or waits for the rows that a restore of all tables gives it."""
        shards = self._cluster.shards.shards
        if not all(shard.phase is ShardPhase.SERVING or _waits_for_rows(shard) for shard in shards):
            self._cluster.check_ready()

    async def _let_in(self, loads: ShardLoads) -> None:
        """Lets shards that wait for rows serve, except for the refused tables; no recovery then restores them."""
        for shard in filter(_waits_for_rows, self._cluster.shards.shards):
            shard.restoring = False
            await loads.until_serving(shard)

    async def _has_rows(self, table_ids: set[int]) -> bool:
        """Whether a table that the restore would empty has a row."""
        return any(usage.rows for usage in await self._shard_calls.usage_of_tables(table_ids))

    async def _begin_damage(self, damage: Damage, manifest: files.Manifest, *, is_of_all: bool) -> Damage | None:
        """Lets the shards refuse the tables, then notes that their rows are lost until the restore has succeeded.

        A restore of all tables raises the lineage. Other tables keep theirs, so that their followers go on.

        When this raises, no table has been emptied, and the shards serve the same tables as before.

        Returns:
            The damage before this restore; None when there was none.
        """
        cluster = self._cluster
        lineage = max(cluster.shards.lineage, manifest.lineage) + 1 if is_of_all else cluster.shards.lineage
        if lineage > _MOST_LINEAGES:
            raise FailedPrecondition("restore: this cluster has used up its 65,535 lineages; start a new one")
        before, source = cluster.damage, cluster.rows_checkpoint
        if before is not None:
            damage.table_ids |= before.table_ids
        cluster.damage = damage
        try:
            await self._shard_calls.send_refusal()
            if is_of_all:
                cluster.shards.lineage = lineage
                for shard in cluster.shards.shards:
                    shard.lineage = lineage
                cluster.rows_checkpoint = None  # set again once all shards have these rows
            self._save()
        except BaseException:
            cluster.damage, cluster.rows_checkpoint = before, source
            await self._send_refusal()
            raise
        cluster.loads += 1
        return before

    async def _take_damage_back(self, before: Damage | None, source: tuple[str, str] | None) -> None:
        """Has the shards serve again what they served before :meth:`_begin_damage`; the lineage stays higher."""
        self._cluster.damage, self._cluster.rows_checkpoint = before, source
        try:
            self._save()
        except SparserowError as error:  # the next state that is saved says it
            log.error("that nothing was restored could not be saved: %s", error)
        await self._send_refusal()

    async def _note_failure(self, failure: str) -> None:
        """Notes that the rows that were being replaced are lost, until a restore has succeeded."""
        damage = self._cluster.damage
        if damage is None or damage.failure:
            return
        damage.failure, damage.request = failure, None
        log.error("%s", damage.text)
        try:
            self._save()
        except SparserowError as error:
            log.error("the damage could not be saved: %s", error)
        await self._send_refusal()

    async def _send_refusal(self) -> None:
        try:
            await self._shard_calls.send_refusal()
        except SparserowError as error:  # the shard is behind now, and is informed when it is back
            log.warning("%s", error)

    async def _note_read_whole(self, folder: Folder, name: str) -> None:
        try:
            await asyncio.to_thread(files.note_read_whole, folder, name)
        # The store may be read-only. The restore has succeeded all the same.
        except (SparserowError, NotImplementedError) as error:
            log.warning(
                "saves may remove %s/%s, because the note that it was read whole could not be written: %s",
                folder.url,
                name,
                error,
            )


def _waits_for_rows(shard: Shard) -> bool:
    """Whether the shard's process has registered and has no rows, because it could not be restored alone, or is about
    to be.
    """
    return shard.phase is ShardPhase.STARTING and shard.restoring and shard.data is not None


def _check_sizes(folder: Folder, chain: list[files.Manifest]) -> None:
    """Compares file sizes with a listing of each checkpoint, before any table is emptied; loads
    compare the checksums.
    """
    for manifest in chain:
        sizes = (folder / manifest.name).sizes()
        for facts in manifest.files():
            where = f"{folder.url}/{manifest.name}/{facts.file}"
            if facts.file not in sizes:
                raise DataLoss(f"{where}: the file is missing; the checkpoint is damaged")
            if sizes[facts.file] != facts.bytes:
                raise DataLoss(f"{where}: the file has {sizes[facts.file]} bytes; its manifest says {facts.bytes}")


def _request_to_repeat(request: pb.RestoreRequest, name: str) -> pb.RestoreRequest | None:
    """Returns the request that a restarted coordinator repeats; None when the workers of the job have to request it
    again.
    """
    if request.caller.job_id:
        return None
    copy = pb.RestoreRequest()
    copy.CopyFrom(request)
    copy.name = name
    return copy


def _is_same(one: pb.RestoreRequest, other: pb.RestoreRequest) -> bool:
    """Whether the two requests ask for the same restore; the callers within the job are not compared."""
    plain = [pb.RestoreRequest.FromString(each.SerializeToString()) for each in (one, other)]
    for each in plain:
        each.ClearField("caller")
        each.ClearField("next_step")
    return bool(one.caller.job_id == other.caller.job_id and plain[0] == plain[1])
