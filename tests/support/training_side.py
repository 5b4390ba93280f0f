"""The part of a training cluster that live sync talks to, in this process: stores behind real gRPC, that can be cut
off, killed and restored from an earlier state.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from sparserow.cpp_ext import _server
from sparserow.proto import control_pb2 as pb, control_pb2_grpc
from sparserow.proto.errors import Unavailable, error_of
from sparserow.proto.process.control_server import ControlServer
from sparserow.proto.schema import TableSchema
from sparserow.proto.schema_message import message_of_schema
from sparserow.ps_server.shard.changes import ChangesService, add_changes
from sparserow.ps_server.shard.native_schema import native_schema

Saved = tuple[dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]], int]


class _Coordinator:
    """What a follower asks of a coordinator."""

    def __init__(self, side: TrainingSide) -> None:
        self._side = side

    async def GetCluster(self, _request: Any, _context: Any) -> pb.GetClusterReply:
        side = self._side
        runs = [pb.SlotRun(start=int(np.argmax(side.owners == shard)), shard=shard) for shard in range(side.shards)]
        addresses = [pb.ShardAddress(shard=shard) for shard in range(side.shards)]
        route = pb.Route(epoch=1, slot_count=side.slot_count, runs=runs)
        return pb.GetClusterReply(cluster_id=side.cluster_id, route=route, shards=addresses)

    async def GetStatus(self, _request: Any, _context: Any) -> pb.GetStatusReply:
        entries = [
            pb.ShardStatus(shard=shard, control=pb.Address(host="127.0.0.1", port=port))
            for shard, port in enumerate(self._side.ports)
        ]
        return pb.GetStatusReply(cluster_id=self._side.cluster_id, shards=entries)

    async def ListTables(self, _request: Any, _context: Any) -> pb.ListTablesReply:
        return pb.ListTablesReply(schemas=[message_of_schema(schema) for schema in self._side.schemas])


class TrainingSide:
    """Shards of rows that this process changes, behind a coordinator and Changes services on real ports."""

    def __init__(self, schemas: list[TableSchema], *, shards: int = 2, slot_count: int = 64, log_bytes: int = 1 << 20):
        _server.set_error_factory(error_of)
        self.schemas, self.shards, self.slot_count, self.cluster_id = schemas, shards, slot_count, 0x1234
        self.owners = (np.arange(slot_count) * shards // slot_count).astype(np.uint16)
        self._log_bytes = log_bytes
        self.stores = [self._store(1) for _ in range(shards)]
        self.ports = [0] * shards
        self._servers: list[ControlServer | None] = [None] * shards
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._coordinator = self._run(self._serve("sparserow.v1.Coordinator", self._add_coordinator))
        self.address = f"127.0.0.1:{self._coordinator.port}"
        for shard in range(shards):
            self.connect(shard)

    def close(self) -> None:
        for shard in range(self.shards):
            self.cut(shard)
        self._run(self._coordinator.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def cut(self, shard: int) -> None:
        """Calls under way fail, new ones find nobody."""
        server, self._servers[shard] = self._servers[shard], None
        if server is not None:
            self._run(server.stop(0))

    def connect(self, shard: int) -> None:
        """Serves at a new port, with what the store has and knows."""
        if self._servers[shard] is not None:
            return

        def engine() -> Any:
            if self._servers[shard] is None:
                raise Unavailable(f"shard {shard} is starting")
            gate = SimpleNamespace(look=nullcontext)
            return SimpleNamespace(store=self.stores[shard], cluster_id=self.cluster_id, follow_gate=gate)

        def add(grpc_server: Any) -> None:
            add_changes(ChangesService(engine), grpc_server)

        self._servers[shard] = self._run(self._serve("sparserow.v1.Changes", add))
        self.ports[shard] = self._servers[shard].port

    def save(self, shard: int) -> Saved:
        """A checkpoint of a shard."""
        rows = {}
        for schema in self.schemas:
            keys, versions, _, values, _, cursor = self.stores[shard].scan(schema.id, max_rows=1 << 20)
            assert cursor == 0
            rows[schema.id] = (keys, versions, values)
        return rows, self.stores[shard].lineage

    def kill_and_restore(self, shard: int, saved: Saved) -> None:
        """The process is gone with its cursors; another one has the rows of a checkpoint and the next lineage."""
        self.cut(shard)
        store = self._store(self.stores[shard].lineage + 1)
        for table, (keys, versions, values) in saved[0].items():
            store.assign_versions(table, keys, versions, values)
        self.stores[shard] = store
        self.connect(shard)

    def push(self, table: int, keys: np.ndarray, grads: np.ndarray) -> None:
        """Applies one gradient per key on the shard that owns it."""
        for shard, mine in self._shares(table, keys):
            self.stores[shard].apply(table, keys[mine], grads[mine], lr=0.1)

    def erase(self, table: int, keys: np.ndarray) -> None:
        for shard, mine in self._shares(table, keys):
            self.stores[shard].erase(table, keys[mine])

    def _shares(self, table: int, keys: np.ndarray) -> list[tuple[int, np.ndarray]]:
        owners = self.owners[_server.slots_of(table, keys, self.slot_count)]
        return [(shard, owners == shard) for shard in range(self.shards)]

    def rows(self) -> dict[tuple[int, int], bytes]:
        """Every row, by table id and key."""
        return {key: row for store in self.stores for key, row in rows_of(store, self.schemas).items()}

    def _store(self, lineage: int) -> _server.Store:
        store = _server.Store(slot_count=self.slot_count, lineage=lineage, change_log_bytes=self._log_bytes)
        for schema in self.schemas:
            store.create_table(native_schema(schema))
        return store

    def _add_coordinator(self, grpc_server: Any) -> None:
        service = type("Service", (control_pb2_grpc.CoordinatorServicer, _Coordinator), {})
        asked = _Coordinator(self)
        for name in ("GetCluster", "GetStatus", "ListTables"):
            setattr(service, name, getattr(asked, name))
        control_pb2_grpc.add_CoordinatorServicer_to_server(service.__new__(service), grpc_server)

    async def _serve(self, name: str, add: Callable[[Any], None]) -> ControlServer:
        server = ControlServer(name, add, host="127.0.0.1", port=0)
        await server.start()
        return server

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)


def rows_of(store: _server.Store, schemas: list[TableSchema]) -> dict[tuple[int, int], bytes]:
    """Every row of a store, by table id and key."""
    rows = {}
    for schema in schemas:
        keys, _, _, values, _, cursor = store.scan(schema.id, max_rows=1 << 20)
        assert cursor == 0
        rows.update({(schema.id, key): row.tobytes() for key, row in zip(keys.tolist(), values, strict=True)})
    return rows
