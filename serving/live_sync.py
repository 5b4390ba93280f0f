"""Live sync: keeps the rows of a loaded version up to date with the training cluster.

One thread for each training shard reads pages of changes in this process's slots. It applies a page and acknowledges it
with the next read. The newest version of a row wins; a snapshot of a slot replaces the slot. A shard sends again what
was not acknowledged, so either side may be killed at any moment. When a shard does not know the cursor, the thread
opens it again at the versions that this store has. A shard of another lineage sends its slots whole.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from ..cpp_ext import _server
from ..proto import changes_pb2 as pb, changes_pb2_grpc as pb_grpc
from ..proto.change_replies import METHOD, read_reply
from ..proto.control import ControlClient
from ..proto.errors import FailedPrecondition, InvalidArgument, NotFound, SparserowError, Unavailable
from ..proto.grpc_status import CHANNEL_OPTIONS, error_of_status
from ..proto.security.channels import open_channel
from .loaded_version import LoadedVersion

log = logging.getLogger(__name__)

FRESHNESS_SEC: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)

_CALL_DEADLINE_SEC = 20.0
_WAIT_MS = 1000
_PAGE_BYTES = 4 << 20
_PAUSE_PER_BUSY = 20.0  # seconds of pause for each CPU second of this thread, which does a quarter of a round's work
_LONGEST_ROUND_SEC = 1.0  # the longest round with its pause, which bounds how long a change stays unseen
_PAUSED_LOOK_SEC = 0.02
_IDLE_SEC = 600  # the time after which a shard removes the cursor of a follower that does not come back
_MESSAGE_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", -1))


@dataclass
class SyncStats:
    """The counters of a follower, which are written under its lock.

    Attributes:
        rows: the number of rows that were changed in this store.
        unchanged: the number of rows that were received again and changed nothing.
        erased: the number of rows that were erased from this store.
        pages: the number of pages that were applied.
        reopened: the number of times that a cursor was opened again after a failure.
        freshness: the number of slots in pages by the age of their oldest change when it became visible. Bucket i has
            ages up to FRESHNESS_SEC[i]; the last bucket has larger ages.
        freshness_sum_sec: the sum of these ages, in seconds.
    """

    rows: int = 0
    unchanged: int = 0
    erased: int = 0
    pages: int = 0
    reopened: int = 0
    freshness: list[int] = field(default_factory=lambda: [0] * (len(FRESHNESS_SEC) + 1))
    freshness_sum_sec: float = 0.0


@dataclass(frozen=True)
class ThresholdOptions:
    """The threshold above which a change is sent at once. Rows that have changed less wait.

    Args:
        updates: a row is sent when it was written this many times since it was last sent; 0: not counted.
        move: a row is sent when the L2 distance of its weights from those last sent exceeds this; 0: not measured.
        longest_sec: a row is sent when it has waited this long, in seconds.

    Raises:
        InvalidArgument: a value is out of range.
    """

    updates: int = 0
    move: float = 0.0
    longest_sec: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.updates < 2**32 or not 0 <= self.move < float("inf") or not 0.001 <= self.longest_sec <= 3600:
            raise InvalidArgument(
                f"live sync: {self.updates} updates, a move of {self.move}, {self.longest_sec} s; allowed: "
                "updates in [0, 2**32), move in [0, inf), seconds in [0.001, 3600]"
            )

    @property
    def is_on(self) -> bool:
        """Whether there is a threshold, so that rows may wait."""
        return self.updates > 0 or self.move > 0


NO_THRESHOLD = ThresholdOptions()


@dataclass(frozen=True)
class FollowOptions:
    """The options of live sync.

    Args:
        coordinator: ``HOST:PORT`` of the training cluster's coordinator.
        name: the name of this process, unique among the followers of the cluster; names of cursors begin with it.
        interval_sec: the shortest pause between two rounds over all slots, in seconds; several changes of a row
            meanwhile are sent once. After a round with much work the pause is longer, until a second has passed since
            the round began.
        retry_sec: the pause after a failure, in seconds.
        threshold: the threshold below which training shards keep changed rows back for a while.
    """

    coordinator: str
    name: str
    interval_sec: float = 0.1
    retry_sec: float = 0.5
    threshold: ThresholdOptions = NO_THRESHOLD


class AnotherCluster(FailedPrecondition):
    """Raised when the coordinator belongs to another cluster than the one that trained the version."""


class Follower:
    """Keeps a version's store up to date with the rows of the training cluster. Thread-safe.

    It has a thread for each training shard; ``close`` ends them.

    Args:
        version: the version whose store follows; no other code may write to the store.
        owned: whether this process owns each slot, (slot_count) bool.
        options: the cluster to follow, and how.

    Raises:
        Unavailable: the coordinator cannot be reached, or a shard does not serve.
        FailedPrecondition: the cluster is not the one that trained the version, or a table has another schema.
        NotFound: the cluster does not have a table of the version.
    """

    def __init__(self, version: LoadedVersion, owned: NDArray[np.bool_], options: FollowOptions) -> None:
        self._version = version
        self._owned = owned
        self._options = options
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._stats = SyncStats()
        self._problems: dict[int, str] = {}
        self._caught_up: dict[int, float] = {}
        self._is_superseded = False
        self._paused = False
        self._turns = 0  # the number of pages that are being read and applied
        shards = _checked_shards(version, options.coordinator)
        self._threads = [
            threading.Thread(target=self._run, args=(shard,), name=f"sparserow-sync-{shard}", daemon=True)
            for shard in shards
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads; shards that can be reached remove the cursors at once."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_CALL_DEADLINE_SEC + 5)

    def stats(self) -> SyncStats:
        """Returns a copy of the counters so far."""
        with self._lock:
            return SyncStats(**{**vars(self._stats), "freshness": list(self._stats.freshness)})

    def pause(self) -> None:
        """Stops applying pages after the present one; the shards keep further changes for this follower."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Applies pages again after :meth:`pause`."""
        with self._lock:
            self._paused = False

    @property
    def is_paused(self) -> bool:
        """Whether :meth:`pause` was called, and :meth:`resume` was not called since."""
        with self._lock:
            return self._paused

    @property
    def is_still(self) -> bool:
        """Whether the follower is paused and no page is being applied any more."""
        with self._lock:
            return self._paused and not self._turns

    def _begin_turn(self) -> bool:
        with self._lock:
            self._turns += not self._paused
            return not self._paused

    def _end_turn(self) -> None:
        with self._lock:
            self._turns -= 1

    @property
    def problem(self) -> str:
        """The reason why the version does not follow now; "" when it does."""
        with self._lock:
            return "; ".join(self._problems.values())

    @property
    def is_superseded(self) -> bool:
        """Whether another cluster has replaced the followed one at the coordinator's address."""
        with self._lock:
            return self._is_superseded

    @property
    def is_complete(self) -> bool:
        """Whether the store has had all changes of every shard once, except rows that the threshold keeps back."""
        with self._lock:
            return len(self._caught_up) == len(self._threads)

    @property
    def behind_sec(self) -> float:
        """The seconds since the store last had all changes of every shard; infinity before the first time.

        Rows that the threshold keeps back are not counted.
        """
        with self._lock:
            if len(self._caught_up) < len(self._threads):
                return float("inf")
            return time.monotonic() - min(self._caught_up.values())

    def _run(self, shard: int) -> None:
        # Only this follower has the key; a later follower, in this process or another, cannot use the cursor.
        cursor = f"{self._options.name}/{self._version.model}@{self._version.version}/{secrets.token_hex(4)}"
        key = _Key()
        while not self._stop.is_set():
            try:
                with _ShardStream(self._version, self._owned, self._options, shard, cursor, key) as stream:
                    self._set_problem(shard, "")
                    self._follow(shard, stream)
            except SparserowError as error:
                if self.problem == "" and not self._stop.is_set():
                    log.warning("live sync of %s: shard %d: %s; trying again", self._version.model, shard, error)
                self._set_problem(shard, f"shard {shard}: {error}")
                with self._lock:
                    self._stats.reopened += 1
                    self._is_superseded = isinstance(error, AnotherCluster)
                self._stop.wait(self._options.retry_sec)
            except Exception as error:  # a bug must not end live sync in silence
                log.exception("live sync of %s: shard %d", self._version.model, shard)
                self._set_problem(shard, f"shard {shard}: {type(error).__name__}: {error}")
                self._stop.wait(self._options.retry_sec)

    def _follow(self, shard: int, stream: _ShardStream) -> None:
        """Reads rounds over all slots until the follower ends.

        A row that changed several times since the last round is sent once. So the pause grows with the work of a
        round, as long as rows stay fresh.
        """
        while not self._stop.is_set():
            begun, busy_before = time.monotonic(), time.thread_time()
            is_last = False
            while not is_last and not self._stop.is_set():
                if not self._begin_turn():
                    self._stop.wait(_PAUSED_LOOK_SEC)
                    continue
                try:
                    applied, is_last = stream.turn()
                finally:
                    self._end_turn()
                if applied is not None:
                    self._count(applied)
            with self._lock:
                if is_last:
                    self._caught_up[shard] = begun
            busy = time.thread_time() - busy_before
            left = _LONGEST_ROUND_SEC - (time.monotonic() - begun)
            self._stop.wait(max(self._options.interval_sec, min(busy * _PAUSE_PER_BUSY, left)))

    def _count(self, applied: dict[str, Any]) -> None:
        with self._lock:
            self._stats.pages += 1
            self._stats.rows += applied["rows"]
            self._stats.unchanged += applied["unchanged"]
            self._stats.erased += applied["erased"]
            self._count_freshness(applied["oldest_at_ms"])

    def _count_freshness(self, oldest_at_ms: NDArray[np.uint32]) -> None:
        known = oldest_at_ms[oldest_at_ms != 0]
        now = np.uint32(int(time.time() * 1000) & 0xFFFFFFFF)
        ages = (now - known).astype(np.int32).clip(0) / 1000.0
        counts = np.bincount(np.searchsorted(FRESHNESS_SEC, ages), minlength=len(self._stats.freshness))
        self._stats.freshness = [a + int(b) for a, b in zip(self._stats.freshness, counts, strict=True)]
        self._stats.freshness_sum_sec += float(ages.sum())

    def _set_problem(self, shard: int, problem: str) -> None:
        with self._lock:
            self._problems.pop(shard, None)
            if problem:
                self._problems[shard] = problem


@dataclass
class _Key:
    """The secret by which a follower proves that a cursor is its own; b"" before the cursor was opened."""

    value: bytes = b""


class _ShardStream:
    """An open cursor at one shard. The shard's secret is stored in ``key``, for the next stream."""

    def __init__(
        self,
        version: LoadedVersion,
        owned: NDArray[np.bool_],
        options: FollowOptions,
        shard: int,
        cursor: str,
        key: _Key,
    ) -> None:
        self._store = version.store
        self._slots = version.slots
        self._cursor = cursor
        self._key = key
        self._acknowledged = 0
        with ControlClient(options.coordinator) as control:
            view = control.cluster()
            status = control.status()
        _check_cluster(version, view.cluster_id)
        control_of = {entry.shard: entry.control for entry in status.shards}
        if shard not in control_of or not control_of[shard].port:
            raise Unavailable(f"shard {shard} has not registered with the coordinator yet")
        address = f"{control_of[shard].host}:{control_of[shard].port}"
        self._peer = f"shard {shard} at {address}"
        self._channel = open_channel(address, options=_MESSAGE_OPTIONS)
        self._stub: Any = pb_grpc.ChangesStub(self._channel)
        self._read: Any = self._channel.unary_unary(METHOD, pb.ReadChangesRequest.SerializeToString)
        self._begin = 0
        self._acked: tuple[bytes, bytes] = (b"", b"")
        wanted = owned & (view.slot_owner == shard)
        versions = np.where(wanted, version.slots, np.uint64(_server.NOT_FOLLOWED)).astype("<u8")
        threshold = options.threshold
        try:
            opened = self._call(
                self._stub.OpenCursor,
                pb.OpenCursorRequest(
                    cursor=cursor,
                    cluster_id=view.cluster_id,
                    versions=versions.tobytes(),
                    table_ids=[table.schema.id for table in version.tables.values()],
                    idle_sec=_IDLE_SEC,
                    hold_updates=threshold.updates,
                    hold_move=threshold.move,
                    hold_ms=int(threshold.longest_sec * 1000) if threshold.is_on else 0,
                    is_owned=True,
                    key=key.value,
                ),
            )
            key.value = opened.key
        except BaseException:
            self._channel.close()
            raise

    def __enter__(self) -> _ShardStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            try:
                self._stub.CloseCursor(pb.CloseCursorRequest(cursor=self._cursor, key=self._key.value), timeout=1.0)
            except grpc.RpcError as error:
                log.info("%s: the cursor was not closed and will expire: %s", self._peer, error.code())
        self._channel.close()

    def turn(self) -> tuple[dict[str, Any] | None, bool]:
        """Reads a page, applies it, and acknowledges the page before.

        Returns:
            The counts of the applied page; None when there was no page within a second. And whether the page was the
            last of a round. Then this store has all changes that the shard had when the round began, except rows that
            the threshold keeps back.
        """
        slots, positions = self._acked
        data = self._call(
            self._read,
            pb.ReadChangesRequest(
                cursor=self._cursor,
                acked_slots=slots,
                acked_versions=positions,
                begin=self._begin,
                max_bytes=_PAGE_BYTES,
                wait_ms=_WAIT_MS,
                key=self._key.value,
            ),
        )
        self._acknowledged += len(slots) // 4
        self._acked = (b"", b"")
        reply, page = read_reply(data)
        if self._key.value and reply.acknowledged != self._acknowledged:
            raise FailedPrecondition(
                f"{self._peer}: {reply.acknowledged} positions were acknowledged in the name of this follower, "
                f"{self._acknowledged} of them by itself; it opens its cursor again at the versions that it has"
            )
        self._begin = reply.next_begin
        if not reply.slots:
            return None, reply.is_last
        applied = self._store.apply_changes(page)
        self._slots[applied["slots"]] = applied["versions"]
        self._acked = (applied["slots"].astype("<u4").tobytes(), applied["positions"].astype("<u8").tobytes())
        return applied, reply.is_last

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=_CALL_DEADLINE_SEC)
        except grpc.RpcError as error:
            raise error_of_status(error, self._peer) from None


def _checked_shards(version: LoadedVersion, coordinator: str) -> Sequence[int]:
    """Checks that the training cluster is the one of the version, and returns the numbers of its shards."""
    with ControlClient(coordinator) as control:
        view = control.cluster()
        _check_cluster(version, view.cluster_id)
        there = {schema.name: schema for schema in control.list_tables(version.namespace)}
    if view.slot_count != version.slot_count:
        raise FailedPrecondition(f"the cluster has {view.slot_count} slots, but the model has {version.slot_count}")
    for name, table in version.tables.items():
        schema = there.get(name)
        if schema is None:
            raise NotFound(f"table {version.namespace}/{name} is not in the cluster at {coordinator} any more")
        if (schema.id, schema.version, schema.dim) != (table.schema.id, table.schema.version, table.schema.dim):
            raise FailedPrecondition(
                f"table {schema.full_name} has dim {schema.dim} and schema version {schema.version} in training, but "
                f"{table.schema.dim} and {table.schema.version} in {version.model}@{version.version}; publish it again"
            )
    if not view.shards:
        raise InvalidArgument(f"the cluster at {coordinator} has no shards")
    return [shard.index for shard in view.shards]


def _check_cluster(version: LoadedVersion, cluster_id: int) -> None:
    if version.cluster_id != cluster_id:
        raise AnotherCluster(
            f"{version.model}@{version.version} was trained by cluster {version.cluster_id:016x}, "
            f"not by {cluster_id:016x}; follow that one, or publish from this one"
        )
