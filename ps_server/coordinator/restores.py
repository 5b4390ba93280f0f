"""Restores: all shards go back to a checkpoint together, whatever number of shards wrote it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ...proto import control_pb2 as pb
from ...proto.checkpoint import manifest as files
from ...proto.checkpoint.folder import Folder
from ...proto.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    SparserowError,
)
from ...proto.schema import SGD, TableSchema
from ...proto.schema_message import message_of_schema
from .cluster import Cluster
from .fleet import Fleet, all_of
from .operations import Operations
from .registry import first_difference
from .shards import Shard

log = logging.getLogger(__name__)

_GATHER_DEADLINE_SEC = 600.0
_GATHER_POLL_SEC = 0.02
_MOST_LINEAGES = (1 << 16) - 1


@dataclass
class _Restore:
    """One restore that the workers of a job ask for together."""

    request: pb.RestoreRequest
    entered: set[tuple[int, int]] = field(default_factory=set)  # (worker id, epoch)
    next_step: int = 0  # of the session that is furthest
    done: asyncio.Future[pb.RestoreReply] | None = None
    is_loading: bool = False


class Restores:
    """One restore of a cluster at a time. Belongs to one event loop.

    Args:
        cluster: what goes back.
        fleet: reaches the shards.
        operations: holds the job that goes back.
        save: puts the cluster on disk.
        tables_lock: held while tables are made or dropped.
    """

    def __init__(
        self,
        cluster: Cluster,
        fleet: Fleet,
        operations: Operations,
        save: Callable[[], None],
        tables_lock: asyncio.Lock,
    ) -> None:
        self._cluster = cluster
        self._fleet = fleet
        self._operations = operations
        self._save = save
        self._tables_lock = tables_lock
        self._current: _Restore | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def restore(self, request: pb.RestoreRequest) -> pb.RestoreReply:
        """Answers when all workers of the caller's job have called, and all shards have their rows.

        Raises:
            FailedPrecondition: another job works on this cluster, or the checkpoint does not fit its tables.
            NotFound, DataLoss: the checkpoint, or a file of it, is missing or damaged.
            SparserowError: a shard cannot be reached, or has no room.
        """
        caller = request.caller
        if caller.job_id:
            self._cluster.jobs.find(caller.job_id, caller.worker_id, caller.epoch)
        current = self._current
        if current is None:
            current = self._current = _Restore(request)
            current.done = asyncio.get_running_loop().create_future()
            task = asyncio.get_running_loop().create_task(self._run(current))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif current.is_loading or not _is_same(current.request, request):
            raise FailedPrecondition("another restore of this cluster is under way")
        current.entered.add((caller.worker_id, caller.epoch))
        current.next_step = max(current.next_step, request.next_step)
        assert current.done is not None
        return await asyncio.shield(current.done)

    async def _run(self, restore: _Restore) -> None:
        assert restore.done is not None
        try:
            await self._gather(restore)
            restore.is_loading = True
            reply = await self._load(restore)
            restore.done.set_result(reply)
        except SparserowError as error:
            restore.done.set_exception(error)
        except asyncio.CancelledError:
            restore.done.cancel()
            raise
        except Exception as error:
            log.exception("restore failed")
            restore.done.set_exception(Internal(f"{type(error).__name__}: {error}"))
        finally:
            self._current = None
            if restore.done.done() and not restore.done.cancelled():
                restore.done.exception()  # nobody may wait for it any more

    async def _gather(self, restore: _Restore) -> None:
        job_id = restore.request.caller.job_id
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _GATHER_DEADLINE_SEC
        while True:
            jobs = self._cluster.jobs.jobs
            others = [job.full_name for number, job in jobs.items() if number != job_id]
            if others:
                raise FailedPrecondition(
                    f"restore: jobs {', '.join(sorted(others))} are working on this cluster; stop them first"
                )
            job = jobs.get(job_id)
            members = {(m.ticket.worker_id, m.ticket.epoch) for m in job.members.values()} if job is not None else set()
            if members <= restore.entered:
                return
            if loop.time() > deadline:
                missing = ", ".join(str(worker) for worker, _ in sorted(members - restore.entered))
                raise DeadlineExceeded(f"restore: workers {missing} did not call it; all workers of a job do together")
            await asyncio.sleep(_GATHER_POLL_SEC)

    async def _load(self, restore: _Restore) -> pb.RestoreReply:
        cluster, request = self._cluster, restore.request
        job_id = request.caller.job_id
        cluster.check_ready()
        folder = Folder(request.url)
        chain = await asyncio.to_thread(files.read_chain, folder, request.name or None)
        manifest = chain[-1]
        if manifest.slot_count != cluster.slots.slot_count:
            raise FailedPrecondition(
                f"restore: {manifest.name} is of a cluster with {manifest.slot_count} slots, this one has "
                f"{cluster.slots.slot_count}; start it with --slot-count={manifest.slot_count}"
            )
        await asyncio.to_thread(_check_sizes, folder, chain)
        async with self._tables_lock:
            tables = self._plan(chain, request)
            lineage = max(cluster.shards.lineage, manifest.lineage) + 1
            if lineage > _MOST_LINEAGES:
                raise FailedPrecondition("restore: this cluster has used up its 65,535 lineages; start a new one")
            cluster.shards.lineage = lineage
            for shard in cluster.shards.shards:
                shard.lineage = lineage
            cluster.rows_source = None  # until all shards have these rows
            self._save()
            load = pb.LoadRequest(
                url=folder.url,
                lineage=lineage,
                tables=tables,
                slots=[chain_file(chain, index, facts) for index, each in enumerate(chain) for facts in each.slots],
                cluster_id=manifest.cluster_id,
            )
            next_step = max(restore.next_step, manifest.step + 1)
            parts = {
                f"{each.name}/{part.file}": part for each in chain for table in each.tables for part in table.parts
            }

            async def load_all(windows_json: str) -> list[pb.LoadReply]:
                load.windows_json = windows_json
                return await all_of(
                    self._load_shard(shard, self._part_of(load, parts, shard.index)) for shard in cluster.shards.shards
                )

            loaded = await (self._operations.restart(job_id, next_step, load_all) if job_id else load_all("[]"))
            if job_id:
                saved = next((job.data for job in manifest.jobs if job.job_id == job_id), {})
                cluster.data.restore(job_id, cluster.jobs.jobs[job_id].generation, saved)
            is_whole = not (request.tables or request.renames or request.reset_optimizer)
            if is_whole:
                cluster.has_rows_in(folder.url, manifest)
            self._save()
        rows = sum(reply.rows for reply in loaded)
        log.info("restored %s/%s: %d rows, lineage %d", folder.url, manifest.name, rows, lineage)
        return pb.RestoreReply(
            name=manifest.name,
            step=manifest.step,
            rows=rows,
            bytes=sum(each.size for each in chain),
            next_step=next_step,
        )

    def _part_of(self, load: pb.LoadRequest, parts: dict[str, files.PartEntry], shard: int) -> pb.LoadRequest:
        """Without the files that have no rows of a shard's slots; a renamed table's rows may be in any."""
        mine = pb.LoadRequest.FromString(load.SerializeToString())
        slots = self._cluster.slots
        for table in mine.tables:
            if table.schema.id == table.saved_table_id:
                held = list(table.parts)
                del table.parts[:]
                table.parts.extend(
                    file
                    for file in held
                    if slots.owns_any(shard, parts[file.file.file].first_slot, parts[file.file.file].end_slot)
                )
        return mine

    async def _load_shard(self, shard: Shard, request: pb.LoadRequest) -> pb.LoadReply:
        last = pb.LoadReply()
        async for reply in self._fleet.stream(shard, "Load", request):
            last = reply
        return last

    def _plan(self, chain: list[files.Manifest], request: pb.RestoreRequest) -> list[pb.LoadTable]:
        """What each shard loads: the tables of the checkpoint, and the empty ones of the namespace."""
        manifest = chain[-1]
        saved = {table.schema.full_name: table for table in manifest.tables}
        renames = {rename.saved: rename.name for rename in request.renames}
        wanted = set(request.tables) or set(saved)
        for name in (*renames, *sorted(wanted)):
            if name not in saved:
                known = ", ".join(sorted(saved)) or "none"
                raise NotFound(f"restore: table {name!r} is not in {manifest.name}; there are: {known}")
        planned: dict[int, pb.LoadTable] = {}
        for name in sorted(wanted | renames.keys()):
            entry = saved[name]
            schema, without_state = self._target(entry.schema, renames.get(name, name), request.reset_optimizer)
            if schema.id in planned:
                raise InvalidArgument(f"restore: two tables would become {schema.full_name}; rename one of them")
            planned[schema.id] = pb.LoadTable(
                schema=message_of_schema(schema),
                saved_table_id=entry.schema.id,
                without_state=without_state,
                parts=[
                    chain_file(chain, index, part)
                    for index, each in enumerate(chain)
                    for table in each.tables
                    if table.schema.id == entry.schema.id
                    for part in table.parts
                ],
            )
        if request.namespace and not request.tables:
            for schema in self._cluster.registry.tables(request.namespace):
                planned.setdefault(schema.id, pb.LoadTable(schema=message_of_schema(schema), saved_table_id=schema.id))
        return list(planned.values())

    def _target(self, saved: TableSchema, name: str, reset_optimizer: bool) -> tuple[TableSchema, bool]:
        """The schema that a saved table is loaded into, and whether its optimizer's state begins anew."""
        namespace, slash, short = name.partition("/")
        if not slash:
            raise InvalidArgument(f"restore: table {name!r} is not allowed; allowed: NAMESPACE/NAME")
        registry = self._cluster.registry
        try:
            present = registry.find(namespace, short)
        except NotFound:
            made, _ = registry.admit(replace(saved, namespace=namespace, name=short))
            return made, False
        difference = first_difference(present, saved)
        if difference is None:
            return present, False
        field_name, now, then = difference
        if field_name in ("dim", "dtype"):
            raise FailedPrecondition(
                f"restore: table {present.full_name} has {field_name} {now!r}, the checkpoint {then!r}; rows cannot be "
                "carried over; leave the table out, or give it another name"
            )
        if _state_of(present) != _state_of(saved) and not reset_optimizer:
            raise FailedPrecondition(
                f"restore: table {present.full_name} has optimizer {_state_of(present)}, the checkpoint "
                f"{_state_of(saved)}; its state begins anew only when asked (reset_optimizer)"
            )
        return present, _state_of(present) != _state_of(saved)


def chain_file(chain: list[files.Manifest], index: int, facts: files.FileFacts) -> pb.ChainFile:
    """A file of one of the checkpoints of a chain, named from the folder that all of them are in."""
    file = pb.WrittenFile(file=f"{chain[index].name}/{facts.file}", bytes=facts.bytes, xxh3=facts.xxh3)
    return pb.ChainFile(file=file, index=index)


def _check_sizes(folder: Folder, chain: list[files.Manifest]) -> None:
    """Before anything is emptied; checksums are compared when the files are read."""
    for held, facts in ((folder / manifest.name, facts) for manifest in chain for facts in manifest.files()):
        try:
            size = held.size(facts.file)
        except NotFound:
            raise DataLoss(f"{held.url}/{facts.file}: is missing; the checkpoint is damaged") from None
        if size != facts.bytes:
            raise DataLoss(f"{held.url}/{facts.file}: has {size} bytes, its manifest says {facts.bytes}")


def rows_differ(present: TableSchema, saved: TableSchema) -> bool:
    """Whether rows of one schema cannot be rows of the other."""
    return (present.dim, present.dtype, _state_of(present)) != (saved.dim, saved.dtype, _state_of(saved))


def _state_of(schema: TableSchema) -> str:
    """What decides the form of the optimizer's state."""
    optimizer = schema.optimizer
    has_momentum = isinstance(optimizer, SGD) and optimizer.momentum != 0
    return type(optimizer).__name__ + (" with momentum" if has_momentum else "")


def _is_same(one: pb.RestoreRequest, other: pb.RestoreRequest) -> bool:
    """Whether two callers ask for the same, whoever they are."""
    plain = [pb.RestoreRequest.FromString(each.SerializeToString()) for each in (one, other)]
    for each in plain:
        each.ClearField("caller")
        each.ClearField("next_step")
    return bool(one.caller.job_id == other.caller.job_id and plain[0] == plain[1])
