"""The gateway: rows of a training cluster by key over gRPC, for programs in any language (proto/rows.proto).

It is a worker of a job of its own in each namespace, without a clock. Pulls go from here to the shards as any client's;
pushes follow each other, one commit each.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..cpp_ext import _client
from ..proto import rows_pb2 as pb
from ..proto.control import ControlClient
from ..proto.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Fenced,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SparserowError,
    StaleRoute,
    Unavailable,
)
from ..proto.schema import TableSchema
from ..worker.lease import REPLAY_BYTES, Lease
from ..worker.shard_client import shard_client
from ..worker.table import TableRows
from .gateway_metrics import GatewayMetrics

log = logging.getLogger(__name__)

MOST_CLIENTS = 65_536
_MOST_KEYS = 1_000_000
_DEADLINE_MS = 30_000

T = TypeVar("T")


@dataclass
class _Pushes:
    """What a client has pushed: its last number, and whether it is known that it was applied."""

    last: int = 0
    is_known: bool = True
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Namespace:
    """A place in a job of the namespace, and its tables. Thread-safe."""

    def __init__(self, coordinator: str, namespace: str) -> None:
        self._control = ControlClient(coordinator)
        try:
            view = self._control.cluster()
            identity = self._control.register_worker(
                namespace=namespace,
                job=f"gateway-{secrets.token_hex(8)}",
                rank=0,
                world_size=1,
                staleness=None,
                grad_scale="mean",
            )
        except BaseException:
            self._control.close()
            raise
        self._lease = Lease(self._control, identity)
        self._name = namespace
        self._client = shard_client(view, self._control.security, identity, replay_bytes=REPLAY_BYTES)
        self._native = _client.NativeSession(
            self._client.shards,
            first_step=0,
            first_sequence=1,
            clocked=False,
            grad_sum=False,
            deadline_ms=_DEADLINE_MS,
        )
        self._lease.follow(self._native, self._client, _DEADLINE_MS / 1000)
        self._push_lock = threading.Lock()
        self._tables: dict[str, TableSchema] = {}

    def close(self) -> None:
        """Leaves the job."""
        self._native.close()
        self._lease.end()

    def pull(self, table: str, keys: NDArray[np.uint64]) -> tuple[TableSchema, Any, Any]:
        """The table, rows (n, dim) and found (n)."""
        schema = self._schema(table)
        rows, _, found = self._client.pull(
            schema.id, keys, dim=schema.dim, schema_version=schema.version, found=True, deadline_ms=_DEADLINE_MS
        )
        return schema, rows, found

    def push(self, table: str, keys: NDArray[np.uint64], grads: bytes, lr: float | None) -> None:
        """Applies gradients."""
        schema = self._schema(table)
        if len(grads) != 4 * schema.dim * len(keys):
            raise InvalidArgument(
                f"grads: {len(grads)} bytes are not allowed; allowed for {len(keys)} keys of table {schema.full_name}: "
                f"{4 * schema.dim * len(keys)}, float32 each"
            )
        values = np.frombuffer(grads, "<f4").reshape(len(keys), schema.dim)
        with self._push_lock:
            TableRows(self._native, schema).push(keys, values, lr)

    def _schema(self, table: str) -> TableSchema:
        if table not in self._tables:
            self._tables = {schema.name: schema for schema in self._control.list_tables(self._name)}
        if table not in self._tables:
            known = ", ".join(sorted(self._tables)) or "none"
            raise NotFound(f"table {table!r}: is not in namespace {self._name!r}; there are: {known}")
        return self._tables[table]


class Gateway:
    """The Rows service. Belongs to one event loop; calls to the shards run in threads.

    Args:
        coordinator: ``HOST:PORT`` of the training cluster.

    Attributes:
        metrics: of its calls.
    """

    def __init__(self, coordinator: str) -> None:
        self.metrics = GatewayMetrics()
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._namespaces: dict[str, _Namespace] = {}
        self._clients: OrderedDict[str, _Pushes] = OrderedDict()

    def close(self) -> None:
        """Leaves every job."""
        with self._lock:
            held, self._namespaces = self._namespaces, {}
        for namespace in held.values():
            namespace.close()

    async def Pull(self, request: pb.PullRowsRequest, context: Any) -> pb.PullRowsReply:
        """Rows of keys."""
        keys = _keys(request.keys, request.packed_keys)
        with self.metrics.call("Pull", len(keys)):
            schema, rows, found = await asyncio.to_thread(
                self._with, request.namespace, lambda namespace: namespace.pull(request.table, keys)
            )
        return pb.PullRowsReply(dim=schema.dim, rows=rows.astype("<f4", copy=False).tobytes(), found=found.tobytes())

    async def Push(self, request: pb.PushRowsRequest, context: Any) -> pb.PushRowsReply:
        """Applies gradients, once."""
        keys = _keys(request.keys, request.packed_keys)
        lr = request.lr if request.HasField("lr") else None
        pushes = self._pushes(request.client)
        with self.metrics.call("Push", len(keys)):
            return await self._push_once(request, pushes, keys, lr)

    async def _push_once(
        self, request: pb.PushRowsRequest, pushes: _Pushes, keys: NDArray[np.uint64], lr: float | None
    ) -> pb.PushRowsReply:
        async with pushes.lock:
            if _is_repeated(request, pushes):
                self.metrics.repeated()
                return pb.PushRowsReply(was_applied_before=True)
            try:
                await asyncio.to_thread(
                    self._with,
                    request.namespace,
                    lambda namespace: namespace.push(request.table, keys, request.grads, lr),
                )
            except (Unavailable, DeadlineExceeded):
                pushes.last, pushes.is_known = request.sequence, False
                raise
            pushes.last, pushes.is_known = request.sequence, True
        return pb.PushRowsReply()

    def _pushes(self, client: str) -> _Pushes:
        if not 1 <= len(client.encode()) <= 200:
            raise InvalidArgument(f"client: {client!r} is not allowed; allowed: 1 to 200 bytes")
        if client not in self._clients and len(self._clients) >= MOST_CLIENTS:
            raise ResourceExhausted(f"client {client!r}: this gateway knows {MOST_CLIENTS} clients; restart it")
        pushes = self._clients.setdefault(client, _Pushes())
        self.metrics.clients = len(self._clients)
        return pushes

    def _with(self, name: str, call: Callable[[_Namespace], T]) -> T:
        """The call in a namespace. One that was refused because the cluster has changed is made again, once."""
        for is_last in (False, True):
            namespace = self._namespace(name)
            try:
                return call(namespace)
            except (Fenced, StaleRoute):
                if is_last:
                    raise
                self._drop(name, namespace)
            except (Unavailable, DeadlineExceeded):
                self._drop(name, namespace)  # the next call looks where the shards are
                raise
        raise AssertionError("unreachable")

    def _namespace(self, name: str) -> _Namespace:
        if not name:
            raise InvalidArgument("namespace: is missing")
        with self._lock:
            if name not in self._namespaces:
                self._namespaces[name] = _Namespace(self._coordinator, name)
                self.metrics.namespaces = len(self._namespaces)
            return self._namespaces[name]

    def _drop(self, name: str, namespace: _Namespace) -> None:
        with self._lock:
            if self._namespaces.get(name) is not namespace:
                return
            del self._namespaces[name]
            self.metrics.namespaces = len(self._namespaces)
        try:
            namespace.close()
        except SparserowError as error:
            log.info("namespace %s: %s", name, error)


def _keys(keys: Any, packed: bytes) -> NDArray[np.uint64]:
    if packed and (len(keys) or len(packed) % 8):
        raise InvalidArgument("packed_keys are uint64, 8 bytes each, and stand in place of keys")
    array = np.frombuffer(packed, "<u8") if packed else np.array(keys, dtype=np.uint64)
    if len(array) > _MOST_KEYS:
        raise InvalidArgument(f"keys: {len(array)}; allowed: at most {_MOST_KEYS} in a call")
    return np.ascontiguousarray(array, dtype=np.uint64)


def _is_repeated(request: pb.PushRowsRequest, pushes: _Pushes) -> bool:
    """Whether this number was applied before; raises when it may not come now."""
    who = f"client {request.client!r}: sequence {request.sequence}"
    if request.sequence == pushes.last and pushes.last > 0:
        if not pushes.is_known:
            raise FailedPrecondition(f"{who}: it is not known whether it was applied; go on with the next one")
        return True
    if request.sequence == pushes.last + 1:
        return False
    if pushes.last == 0:
        raise FailedPrecondition(
            f"{who} is not the first, and this gateway does not know the client: was it restarted? Begin with 1 under "
            "another name"
        )
    raise FailedPrecondition(f"{who} is not allowed; allowed: {pushes.last} again, or {pushes.last + 1}")
