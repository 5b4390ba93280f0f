"""The gateway: rows of a training cluster by key over gRPC, for programs in any language (proto/rows.proto).

It is a worker of a job of its own in each namespace, without a clock. Pulls go from here to the shards as any client's;
a push is one commit. A push that has begun runs to its end, whatever becomes of the call that brought it
(deploy/push_windows.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

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
    SparserowError,
    StaleRoute,
    Unavailable,
)
from ..proto.schema import TableSchema
from ..proto.unary_replies import FEW_KEYS, UnaryReplies
from ..worker.lease import REPLAY_BYTES, Lease
from ..worker.shard_client import shard_client
from ..worker.table import TableRows
from .gateway_metrics import GatewayMetrics
from .push_windows import ClientKey, PushWindows

log = logging.getLogger(__name__)

_MOST_KEYS = 1_000_000
_DEADLINE_MS = 30_000
_THREADS = 32  # calls to shards at once
_CLOSE_SEC = 2 * _DEADLINE_MS / 1000  # how long pushes that run are waited for at the end

T = TypeVar("T")
_Request: TypeAlias = pb.PullRowsRequest | pb.PushRowsRequest


class _UnknownTable(NotFound):
    """The namespace has no such table: nothing is amiss with the gateway's place in it."""


class _Namespace:
    """A place in a job of the namespace, and its tables. Thread-safe.

    Attributes:
        users: calls that use it now; guarded by the gateway's lock, as ``is_over`` is.
        is_over: whether later calls get another one; the last user closes it.
    """

    def __init__(self, coordinator: str, namespace: str, table: str) -> None:
        self._control = ControlClient(coordinator)
        self._name = namespace
        self._tables: dict[str, TableSchema] = {}
        try:
            self.schema(table)  # before a job is made: a name that was made up makes none
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
        self.users = 0
        self.is_over = False

    def close(self) -> None:
        """Leaves the job."""
        self._native.close()
        self._lease.end()

    def pull(self, table: str, keys: NDArray[np.uint64]) -> tuple[TableSchema, Any, Any]:
        """The table, rows (n, dim) and found (n)."""
        schema = self.schema(table)
        rows, _, found = self._client.pull(
            schema.id, keys, dim=schema.dim, schema_version=schema.version, found=True, deadline_ms=_DEADLINE_MS
        )
        return schema, rows, found

    def push(self, table: str, keys: NDArray[np.uint64], grads: bytes, lr: float | None) -> None:
        """Applies gradients."""
        schema = self.schema(table)
        if len(grads) != 4 * schema.dim * len(keys):
            raise InvalidArgument(
                f"grads: {len(grads)} bytes are not allowed; allowed for {len(keys)} keys of table {schema.full_name}: "
                f"{4 * schema.dim * len(keys)}, float32 each"
            )
        values = np.frombuffer(grads, "<f4").reshape(len(keys), schema.dim)
        TableRows(self._native, schema).push(keys, values, lr)

    def schema(self, table: str) -> TableSchema:
        """Of a table by name; NotFound names those that there are."""
        if table not in self._tables:
            self._tables = {schema.name: schema for schema in self._control.list_tables(self._name)}
        if table not in self._tables:
            known = ", ".join(sorted(self._tables)) or "none"
            raise _UnknownTable(f"table {table!r}: is not in namespace {self._name!r}; there are: {known}")
        return self._tables[table]


class Gateway:
    """The Rows service. Belongs to one event loop; calls to the shards run in threads of its own.

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
        self._joining: dict[str, threading.Lock] = {}  # by namespace: held while the gateway joins it
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sparserow-gateway")
        self._windows = PushWindows()
        self._replies = UnaryReplies()

    async def close(self) -> None:
        """Waits for the pushes that run, then leaves every job."""
        await self._windows.drain(_CLOSE_SEC)
        with self._lock:
            namespaces, self._namespaces = self._namespaces, {}
        for namespace in namespaces.values():
            namespace.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def Pull(self, request: pb.PullRowsRequest, context: Any) -> pb.PullRowsReply:
        """Rows of keys."""
        keys = _keys(request.keys, request.packed_keys)
        with self.metrics.call("Pull", len(keys)):
            if len(keys) > FEW_KEYS:
                asked = await self._in_thread(request, lambda namespace: namespace.schema(request.table))
                await self._replies.charge(context, {request.table: (len(keys), asked.dim)})
            schema, rows, found = await self._in_thread(request, lambda namespace: namespace.pull(request.table, keys))
        return pb.PullRowsReply(dim=schema.dim, rows=rows.astype("<f4", copy=False).tobytes(), found=found.tobytes())

    async def Push(self, request: pb.PushRowsRequest, context: Any) -> pb.PushRowsReply:
        """Applies gradients, once."""
        keys = _keys(request.keys, request.packed_keys)
        lr = request.lr if request.HasField("lr") else None
        with self.metrics.call("Push", len(keys)):
            try:
                was_applied_before = await self._windows.push(
                    ClientKey(request.namespace, request.client),
                    request.sequence,
                    lambda: self._in_thread(
                        request, lambda namespace: namespace.push(request.table, keys, request.grads, lr)
                    ),
                )
            finally:
                self.metrics.clients = len(self._windows)
            if was_applied_before:
                self.metrics.repeated()
        return pb.PushRowsReply(was_applied_before=was_applied_before)

    async def _in_thread(self, request: _Request, call: Callable[[_Namespace], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._with, request.namespace, request.table, call)

    def _with(self, name: str, table: str, call: Callable[[_Namespace], T]) -> T:
        """The call in a namespace. One that was refused because the cluster has changed is made again, once, in a new
        job; never one that may have been applied.
        """
        for is_last in (False, True):
            namespace = self._enter(name, table)
            try:
                return call(namespace)
            except _UnknownTable:
                raise
            except (Fenced, StaleRoute, NotFound, FailedPrecondition) as error:
                self._retire(name, namespace)
                if is_last or error.may_be_applied:
                    raise
            except (Unavailable, DeadlineExceeded):
                self._retire(name, namespace)  # the next call looks where the shards are
                raise
            finally:
                self._leave(namespace)
        raise AssertionError("unreachable")

    def _enter(self, name: str, table: str) -> _Namespace:
        if not name:
            raise InvalidArgument("namespace: is missing")
        with self._lock:
            joining = self._joining.setdefault(name, threading.Lock())
        try:
            with joining:  # others go on meanwhile
                with self._lock:
                    namespace = self._namespaces.get(name)
                    if namespace is not None:
                        namespace.users += 1
                        return namespace
                made = _Namespace(self._coordinator, name, table)
                with self._lock:
                    namespace = self._namespaces.setdefault(name, made)
                    namespace.users += 1
                    self.metrics.namespaces = len(self._namespaces)
                if namespace is not made:  # another call has joined it at the same moment
                    made.close()
                return namespace
        finally:
            with self._lock:
                if not joining.locked():
                    self._joining.pop(name, None)

    def _retire(self, name: str, namespace: _Namespace) -> None:
        """Later calls get another one."""
        with self._lock:
            namespace.is_over = True
            if self._namespaces.get(name) is namespace:
                del self._namespaces[name]
                self.metrics.namespaces = len(self._namespaces)

    def _leave(self, namespace: _Namespace) -> None:
        with self._lock:
            namespace.users -= 1
            if namespace.users or not namespace.is_over:
                return
        try:
            namespace.close()
        except SparserowError as error:
            log.info("leaving a job: %s", error)


def _keys(keys: Any, packed: bytes) -> NDArray[np.uint64]:
    if packed and (len(keys) or len(packed) % 8):
        raise InvalidArgument("packed_keys are uint64, 8 bytes each, and stand in place of keys")
    array = np.frombuffer(packed, "<u8") if packed else np.array(keys, dtype=np.uint64)
    if len(array) > _MOST_KEYS:
        raise InvalidArgument(f"keys: {len(array)}; allowed: at most {_MOST_KEYS} in a call")
    return np.ascontiguousarray(array, dtype=np.uint64)
