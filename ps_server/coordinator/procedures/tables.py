"""Creates and drops tables, on all shards or on none."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

from ....proto import control_pb2 as pb
from ....proto.errors import FailedPrecondition, InvalidArgument, NotFound, SparserowError
from ....proto.schema import TableSchema
from ....proto.schema_message import message_of_schema, schema_of_message
from ....proto.security.security import process_security
from ..state.cluster import Cluster
from .shard_calls import ShardCalls
from .turn_lock import TurnLock

log = logging.getLogger(__name__)

T = TypeVar("T")


class Tables:
    """Changes the tables of a cluster, one change at a time, by turns of namespaces. It belongs to one event loop.

    A change that has begun reaches every shard, whether its caller still waits or not. A shard that was left out would
    bring the rows of a dropped table to the next table of its name.

    Args:
        cluster: the state of the cluster; only this class and a restore change its registry.
        shard_calls: the connections to the shards.
        save: saves the cluster, where it is saved, before anything is sent to a shard.
        wait_for: ends the leases of late workers of jobs, for which something waits.

    Attributes:
        lock: held by everything that must not overlap with a change of tables.
    """

    def __init__(
        self,
        cluster: Cluster,
        shard_calls: ShardCalls,
        save: Callable[[], None],
        wait_for: Callable[[Collection[int]], Awaitable[None]],
    ) -> None:
        self._cluster = cluster
        self._shard_calls = shard_calls
        self._save = save
        self._wait_for = wait_for
        self.lock = TurnLock()
        self._changes: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Cancels the changes that are under way; a shard that was not informed drops the table when it catches up."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def create(self, request: pb.CreateTableRequest) -> pb.CreateTableReply:
        """Creates a table, or finds it.

        Raises:
            FailedPrecondition: the table exists with another schema.
            ResourceExhausted: the namespace has as many tables as it may have.
            Unavailable: not every shard serves; nothing is changed.
            SparserowError: a shard refused; no shard has the table.
        """
        return await self._to_the_end(request.schema.namespace, lambda: self._create(request))

    async def drop(self, request: pb.DropTablesRequest, *, counts: bool = True) -> pb.DropTablesReply:
        """Removes tables and their rows, or a namespace with its tables; a dry run reports what would be removed.

        Args:
            request: names the tables.
            counts: whether every shard is asked first how many rows the tables have, for the reply.

        Raises:
            InvalidArgument: the request names neither tables nor the whole namespace, or both.
            NotFound: there is no such table, or no such namespace.
            FailedPrecondition: a job of the namespace has workers, and the request refuses that.
            Unavailable: not every shard serves, and nothing is changed; or a shard was lost meanwhile, and drops the
                tables when it is back.
        """
        if bool(request.names) == request.whole_namespace:
            raise InvalidArgument("DropTablesRequest: names or whole_namespace must be given, and not both")
        return await self._to_the_end(request.namespace, lambda: self._drop(request, counts=counts))

    async def _create(self, request: pb.CreateTableRequest) -> pb.CreateTableReply:
        registry, wanted = self._cluster.registry, schema_of_message(request.schema)
        if registry.get(wanted.namespace, wanted.name) is None:
            count = registry.table_count(wanted.namespace) + 1
            process_security().quotas.check_tables(wanted.namespace, count)
        schema, created = registry.admit(wanted)
        message = message_of_schema(schema)
        try:
            if created:
                self._save()
            await self._shard_calls.create_table(message)
        except SparserowError:
            if created:
                await self._take_back(schema.id)
            raise
        if created:
            log.info("table %s created (id %d, dim %d)", schema.full_name, schema.id, schema.dim)
        return pb.CreateTableReply(schema=message, created=created)

    async def _take_back(self, table_id: int) -> None:
        """Undoes a creation that a shard refused; a shard that cannot be informed drops the
        table when it catches up.
        """
        self._cluster.registry.remove(table_id)
        try:
            self._save()
            await self._shard_calls.drop_table(table_id)
        except SparserowError as error:
            log.warning("table %d: %s", table_id, error)

    async def _drop(self, request: pb.DropTablesRequest, *, counts: bool) -> pb.DropTablesReply:
        schemas = self._named(request)
        running = self._cluster.jobs.in_namespace(request.namespace)
        if request.only_unused:
            await self._wait_for([job.job_id for job in running])
        jobs = [job.full_name for job in self._cluster.jobs.in_namespace(request.namespace)]
        if jobs and request.only_unused:
            raise FailedPrecondition(
                f"namespace {request.namespace!r}: {', '.join(sorted(jobs)[:5])} may use its tables; end "
                f"{'the job' if len(jobs) == 1 else 'the jobs'} first, or force the removal: their calls then end as "
                f"NotFound"
            )
        reply = pb.DropTablesReply(tables=await self._usage(schemas) if counts else (), jobs=sorted(jobs))
        if request.dry_run:
            return reply
        ids = [schema.id for schema in schemas]
        for table_id in ids:
            self._cluster.registry.remove(table_id)
            self._cluster.row_sources.pop(table_id, None)
        if request.whole_namespace:
            self._cluster.registry.remove_namespace(request.namespace)
        self._save()
        for schema in schemas:
            await self._shard_calls.drop_table(schema.id)
            log.info("table %s dropped", schema.full_name)
        damage = self._cluster.damage
        if damage is not None and damage.table_ids.intersection(ids):
            self._cluster.damage = damage.without(ids)
            self._save()
            await self.send_refusal()
        return reply

    def _named(self, request: pb.DropTablesRequest) -> list[TableSchema]:
        registry = self._cluster.registry
        if not request.whole_namespace:
            return [registry.find(request.namespace, name) for name in sorted(set(request.names))]
        if request.namespace not in registry.namespaces():
            known = ", ".join(registry.namespaces()) or "none"
            raise NotFound(f"there is no namespace {request.namespace!r}; namespaces: {known}")
        return registry.tables(request.namespace)

    async def _usage(self, schemas: list[TableSchema]) -> list[pb.DroppedTable]:
        """Returns the rows and bytes of tables on all shards."""
        rows, size = Counter[int](), Counter[int]()
        for usage in await self._shard_calls.usage_of_tables([schema.id for schema in schemas]):
            rows[usage.table_id] += usage.rows
            size[usage.table_id] += usage.total_bytes + usage.ssd_bytes
        return [pb.DroppedTable(name=schema.name, rows=rows[schema.id], bytes=size[schema.id]) for schema in schemas]

    async def send_refusal(self) -> None:
        """Sends every shard the tables that lack rows now; a shard that cannot be informed is behind, and is
        informed later.
        """
        try:
            await self._shard_calls.send_refusal()
        except SparserowError as error:
            log.warning("%s", error)

    async def _to_the_end(self, namespace: str, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a change under the lock; a caller that goes before its turn changes nothing, and one that goes later
        does not stop the change.
        """
        self._cluster.check_ready()
        await self.lock.acquire(namespace)

        async def run() -> T:
            try:
                self._cluster.check_ready()  # a shard that was lost meanwhile would not be informed
                return await change()
            finally:
                self.lock.release()

        changing = asyncio.get_running_loop().create_task(run())
        self._changes.add(changing)
        changing.add_done_callback(self._changes.discard)
        try:
            return await asyncio.shield(changing)
        except asyncio.CancelledError:
            changing.add_done_callback(_log_failure)
            raise


def _log_failure(change: asyncio.Task[Any]) -> None:
    if not change.cancelled() and (error := change.exception()) is not None:
        log.warning("a change of tables failed after its caller had gone: %s", error)
