"""The gateway: reads and writes rows of a training cluster by key over gRPC, for any language (proto/rows.proto).

In each namespace the gateway is the worker of a job of its own, without a clock. It pulls from the shards like any
client; a push is one commit. A push that has begun runs to its end, even if the call that brought it is cancelled
(worker/gateway/push_windows.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _client
from ...proto import rows_pb2 as pb
from ...proto.control import ControlClient
from ...proto.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Fenced,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SparserowError,
    StaleRoute,
    Unavailable,
    not_allowed,
)
from ...proto.names import check_name
from ...proto.process.unary_replies import FEW_KEYS, UnaryReplies
from ...proto.schema import TableSchema
from ..membership.lease import REPLAY_BYTES, Lease
from ..membership.shard_client import shard_client
from ..session.table import KeyedRows
from .gateway_metrics import GatewayMetrics
from .push_windows import ClientKey, PushWindows

log = logging.getLogger(__name__)

_MOST_KEYS = 1_000_000
_DEADLINE_MS = 30_000
_THREADS = 32  # the most calls to shards at once
_CLOSE_SEC = 2 * _DEADLINE_MS / 1000  # how long close() waits for running pushes

T = TypeVar("T")
_Request: TypeAlias = pb.PullRowsRequest | pb.PushRowsRequest


class _UnknownTable(NotFound):
    """Raised when a namespace has no such table; the gateway's place in its job is still good."""


class _Namespace:
    """The gateway's connection to one namespace: its job there, and the namespace's tables. Thread-safe.

    The gateway's lock guards ``used_at``, ``users`` and ``is_over``.

    Args:
        coordinator: ``HOST:PORT`` of the coordinator.
        namespace: the name of the namespace.
        table: a table that must exist in the namespace.
        job: the name of the job to register.

    Attributes:
        job: the name of the job.
        used_at: the time at which the last call ended, in monotonic seconds.
        users: the number of calls that use the connection now.
        is_over: whether later calls get another connection; the last user closes this one.
    """

    def __init__(self, coordinator: str, namespace: str, table: str, job: str) -> None:
        self.job = job
        self._control = ControlClient(coordinator)
        self._name = namespace
        self._tables: dict[str, TableSchema] = {}
        try:
            self.schema(table)  # first, so that a request with an invented namespace makes no job
            view = self._control.cluster()
            identity = self._control.register_worker(
                namespace=namespace,
                job=job,
                rank=0,
                world_size=1,
                staleness=None,
                grad_scale="mean",
            )
        except BaseException:
            self._control.close()
            raise
        self._lease = Lease(self._control, identity)
        shown = self._control.security
        self._client = shard_client(view, shown, identity, replay_bytes=REPLAY_BYTES)
        self._native = _client.NativeSession(
            self._client.shards,
            first_step=0,
            first_sequence=1,
            clocked=False,
            grad_sum=False,
            deadline_ms=_DEADLINE_MS,
        )
        self._lease.follow(self._native, self._client, _DEADLINE_MS / 1000, shown)
        self.used_at = time.monotonic()
        self.users = 0
        self.is_over = False

    def close(self) -> None:
        """Leaves the job."""
        self._native.close()
        self._lease.end()

    def pull(self, table: str, keys: NDArray[np.uint64]) -> tuple[TableSchema, Any, Any]:
        """Pulls rows by key; returns the table's schema, the rows (n, dim) float32, and which exist (n)."""
        schema = self.schema(table)
        rows, _, found = self._client.pull(
            schema.id, keys, dim=schema.dim, schema_version=schema.version, found=True, deadline_ms=_DEADLINE_MS
        )
        return schema, rows, found

    def push(self, table: str, keys: NDArray[np.uint64], grads: bytes, lr: float | None) -> None:
        """Applies gradients to rows by key.

        Args:
            table: the name of the table.
            keys: the keys, (n).
            grads: the gradients, n * dim little-endian float32 values.
            lr: the learning rate; None: the table's.

        Raises:
            InvalidArgument: the number of bytes does not fit.
        """
        schema = self.schema(table)
        if len(grads) != 4 * schema.dim * len(keys):
            raise InvalidArgument(
                f"grads: {len(grads)} bytes are not allowed; allowed for {len(keys)} keys of table {schema.full_name}: "
                f"{4 * schema.dim * len(keys)}, float32 each"
            )
        values = np.frombuffer(grads, "<f4").reshape(len(keys), schema.dim)
        KeyedRows(self._native, schema).push(keys, values, lr)

    def schema(self, table: str) -> TableSchema:
        """Returns the schema of a table.

        Raises:
            NotFound: the namespace has no such table; the text lists its tables.
        """
        if table not in self._tables:
            self._tables = {schema.name: schema for schema in self._control.list_tables(self._name)}
        if table not in self._tables:
            known = ", ".join(sorted(self._tables)) or "none"
            raise _UnknownTable(f"table {table!r} is not in namespace {self._name!r}; tables there: {known}")
        return self._tables[table]


class Gateway:
    """The gRPC service Rows. It belongs to one event loop; calls to the shards run in threads of its own.

    Args:
        coordinator: ``HOST:PORT`` of the training cluster's coordinator.
        name: the name of this gateway, unique in the cluster. Its jobs are named after it, so that restarts do not
            leave ever more jobs at the coordinator.
        namespaces: the most namespaces to which it is connected at once. When there are more, it leaves the one that
            was idle longest.
        idle_sec: the time without a request after which it leaves a namespace, in seconds.

    Attributes:
        metrics: the counters of its calls.

    Raises:
        InvalidArgument: an argument is out of its range.
    """

    def __init__(self, coordinator: str, name: str, *, namespaces: int = 64, idle_sec: float = 600.0) -> None:
        check_name("--name", name)
        if namespaces < 1:
            raise not_allowed("--namespaces", namespaces, ">= 1")
        if not idle_sec > 0:
            raise not_allowed("--idle", f"{idle_sec:g}s", "> 0s")
        self._name, self._most, self._idle_sec = name, namespaces, idle_sec
        self._jobs: dict[str, set[str]] = {}  # by namespace: the jobs that the gateway is in or is leaving
        self.metrics = GatewayMetrics()
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._namespaces: dict[str, _Namespace] = {}
        self._joining: dict[str, threading.Lock] = {}  # by namespace: held while the gateway joins it
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sparserow-gateway")
        self._windows = PushWindows()
        self._replies = UnaryReplies()

    async def close(self) -> None:
        """Waits for running pushes, and then leaves every job."""
        await self._windows.drain(_CLOSE_SEC)
        with self._lock:
            namespaces, self._namespaces = self._namespaces, {}
        for namespace in namespaces.values():
            namespace.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def Pull(self, request: pb.PullRowsRequest, context: Any) -> pb.PullRowsReply:
        """Answers with the rows of keys."""
        keys = _keys(request.keys, request.packed_keys)
        with self.metrics.call("Pull", len(keys)):
            if len(keys) > FEW_KEYS:
                asked = await self._in_thread(request, lambda namespace: namespace.schema(request.table))
                await self._replies.charge(context, {request.table: (len(keys), asked.dim)})
            schema, rows, found = await self._in_thread(request, lambda namespace: namespace.pull(request.table, keys))
        return pb.PullRowsReply(dim=schema.dim, rows=rows.astype("<f4", copy=False).tobytes(), found=found.tobytes())

    async def Push(self, request: pb.PushRowsRequest, context: Any) -> pb.PushRowsReply:
        """Applies gradients, exactly once for each sequence number of a client."""
        keys = _keys(request.keys, request.packed_keys)
        lr = request.lr if request.HasField("lr") else None
        with self.metrics.call("Push", len(keys)):
            if not len(keys):
                raise InvalidArgument("keys: allowed: 1 or more; a push without keys applies nothing")
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
        return await loop.run_in_executor(
            self._threads, self._call_with_reconnect, request.namespace, request.table, call
        )

    def _call_with_reconnect(self, name: str, table: str, call: Callable[[_Namespace], T]) -> T:
        """Makes a call in a namespace, and returns its result.

        A call that was refused because the cluster has changed is made once more in a new job, unless it may have been
        applied.
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
                self._retire(name, namespace)  # the next call reads the shards' addresses again
                raise
            finally:
                self._leave(name, namespace)
        raise AssertionError("unreachable")

    def _enter(self, name: str, table: str) -> _Namespace:
        if not name:
            raise InvalidArgument("namespace: it is missing")
        with self._lock:
            joining = self._joining.setdefault(name, threading.Lock())
        try:
            with joining:  # calls in other namespaces go on meanwhile
                with self._lock:
                    namespace = self._namespaces.get(name)
                    if namespace is not None:
                        namespace.users += 1
                        return namespace
                namespace = self._join(name, table)
                with self._lock:
                    namespace.users += 1
                    self._namespaces[name] = namespace
                    self.metrics.namespaces = len(self._namespaces)
                return namespace
        finally:
            with self._lock:
                if not joining.locked():
                    self._joining.pop(name, None)

    def _join(self, name: str, table: str) -> _Namespace:
        """Connects to a namespace with a job that this gateway is neither in nor leaving."""
        self._make_room()
        with self._lock:
            jobs = self._jobs.setdefault(name, set())
            number = next(number for number in itertools.count() if self._job(number) not in jobs)
            job = self._job(number)
            jobs.add(job)
        try:
            return _Namespace(self._coordinator, name, table, job)
        except BaseException:
            self._forget_job(name, job)
            raise

    def _job(self, number: int) -> str:
        return f"gateway-{self._name}" + (f"-{number}" if number else "")

    def _forget_job(self, name: str, job: str) -> None:
        with self._lock:
            jobs = self._jobs[name]
            jobs.discard(job)
            if not jobs:
                del self._jobs[name]

    def _make_room(self) -> None:
        with self._lock:
            if len(self._namespaces) < self._most:
                return
            idle = {name: one for name, one in self._namespaces.items() if not one.users}
            if not idle:
                raise ResourceExhausted(
                    f"namespaces: this gateway is busy in {self._most}; allowed: {self._most} at once (--namespaces)"
                )
            longest = min(idle, key=lambda name: idle[name].used_at)
        self._leave_idle(longest, idle[longest])

    def leave_idle(self) -> None:
        """Leaves the namespaces that had no request for ``idle_sec``. Call it periodically, in any thread."""
        now = time.monotonic()
        with self._lock:
            idle = {
                name: one
                for name, one in self._namespaces.items()
                if not one.users and now - one.used_at >= self._idle_sec
            }
        for name, namespace in idle.items():
            self._leave_idle(name, namespace)

    def _leave_idle(self, name: str, namespace: _Namespace) -> None:
        with self._lock:
            if namespace.users:  # a call has begun meanwhile
                return
            namespace.users += 1
        self._retire(name, namespace)
        self._leave(name, namespace)

    def _retire(self, name: str, namespace: _Namespace) -> None:
        """Takes a connection out of use, so that later calls get another one."""
        with self._lock:
            namespace.is_over = True
            if self._namespaces.get(name) is namespace:
                del self._namespaces[name]
                self.metrics.namespaces = len(self._namespaces)

    def _leave(self, name: str, namespace: _Namespace) -> None:
        with self._lock:
            namespace.users -= 1
            namespace.used_at = time.monotonic()
            if namespace.users or not namespace.is_over:
                return
        try:
            namespace.close()
        except SparserowError as error:
            log.info("leaving a job: %s", error)
        finally:
            self._forget_job(name, namespace.job)


def _keys(keys: Any, packed: bytes) -> NDArray[np.uint64]:
    if packed and (len(keys) or len(packed) % 8):
        raise InvalidArgument("packed_keys are uint64, 8 bytes each, and stand in place of keys")
    array = np.frombuffer(packed, "<u8") if packed else np.array(keys, dtype=np.uint64)
    if len(array) > _MOST_KEYS:
        raise InvalidArgument(f"keys: {len(array)}; allowed: at most {_MOST_KEYS} in a call")
    return np.ascontiguousarray(array, dtype=np.uint64)
