"""Creates and drops tables: on all shards or on none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ...proto import control_pb2 as pb
from ...proto.errors import SparserowError
from ...proto.schema_message import message_of_schema, schema_of_message
from .cluster import Cluster
from .fleet import Fleet

log = logging.getLogger(__name__)

T = TypeVar("T")


class Tables:
    """One change at a time. Belongs to one event loop.

    A change that has begun reaches every shard, whether its caller still waits or not. A shard that was left out
    would bring the rows of a dropped table to the next table of its name.

    Args:
        cluster: its registry is changed only here and by a restore.
        fleet: reaches the shards.
        save: puts the cluster on disk (or nowhere), before anything is told to a shard.

    Attributes:
        lock: taken by all that must not meet a change of tables.
    """

    def __init__(self, cluster: Cluster, fleet: Fleet, save: Callable[[], None]) -> None:
        self._cluster = cluster
        self._fleet = fleet
        self._save = save
        self.lock = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Ends what is under way; a shard that was not told drops the table when it catches up."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def create(self, request: pb.CreateTableRequest) -> pb.CreateTableReply:
        """Creates a table, or finds it.

        Raises:
            FailedPrecondition: it is there with another schema.
            Unavailable: not every shard serves; nothing is changed.
            SparserowError: a shard's refusal; no shard has the table.
        """
        return await self._to_the_end(lambda: self._create(request))

    async def drop(self, request: pb.DropTableRequest) -> None:
        """Removes a table and its rows.

        Raises:
            NotFound: there is no such table.
            Unavailable: not every shard serves and nothing is changed, or one was lost meanwhile and drops the table
                when it is back.
        """
        await self._to_the_end(lambda: self._drop(request))

    async def _create(self, request: pb.CreateTableRequest) -> pb.CreateTableReply:
        schema, created = self._cluster.registry.admit(schema_of_message(request.schema))
        message = message_of_schema(schema)
        try:
            if created:
                self._save()
            await self._fleet.create_table(message)
        except SparserowError:
            if created:
                await self._take_back(schema.id)
            raise
        if created:
            log.info("table %s created (id %d, dim %d)", schema.full_name, schema.id, schema.dim)
        return pb.CreateTableReply(schema=message, created=created)

    async def _take_back(self, table_id: int) -> None:
        """Undoes a creation that a shard refused; a shard that cannot be told drops the table when it catches up."""
        self._cluster.registry.remove(table_id)
        try:
            self._save()
            await self._fleet.drop_table(table_id)
        except SparserowError as error:
            log.warning("table %d: %s", table_id, error)

    async def _drop(self, request: pb.DropTableRequest) -> None:
        schema = self._cluster.registry.find(request.namespace, request.name)
        self._cluster.registry.remove(schema.id)
        self._save()
        await self._fleet.drop_table(schema.id)
        damage = self._cluster.damage
        if damage is not None and schema.id in damage.table_ids:
            self._cluster.damage = damage.without([schema.id])
            self._save()
            await self.tell_refusal()
        log.info("table %s dropped", schema.full_name)

    async def tell_refusal(self) -> None:
        """Tells every shard which tables lack rows now; a shard that cannot be told is behind, and is told later."""
        try:
            await self._fleet.tell_refusal()
        except SparserowError as error:
            log.warning("%s", error)

    async def _to_the_end(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """A caller that is gone before its turn has changed nothing; after that the change goes on without it."""
        self._cluster.check_ready()
        await self.lock.acquire()

        async def run() -> T:
            try:
                self._cluster.check_ready()  # a shard that was lost meanwhile would not be told
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
        log.warning("a change of tables whose caller is gone: %s", error)
