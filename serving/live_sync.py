"""Live sync: the rows of a loaded version follow the training cluster.

One thread per training shard reads pages of changes for this process's slots there, applies them (newest wins; a
snapshot replaces), and acknowledges with the next read. What was not acknowledged comes again, so either side may be
killed at any moment: a shard that does not know the cursor gets it opened again at the versions that this store has,
and one of another lineage sends its slots whole.
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
from ..proto.security.security import open_channel
from .loaded_version import LoadedVersion

log = logging.getLogger(__name__)

FRESHNESS_SEC: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)

_CALL_DEADLINE_SEC = 20.0
_WAIT_MS = 1000
_PAGE_BYTES = 4 << 20
_PAUSE_PER_BUSY = 20.0  # of CPU of a thread here, which does a quarter of a round's work
_LONGEST_ROUND_SEC = 1.0  # with its pause: a row's change is no longer unseen
_PAUSED_LOOK_SEC = 0.02
_IDLE_SEC = 600  # after which a shard forgets a follower that does not come back
_MESSAGE_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", -1))


@dataclass
class SyncStats:
    """What a follower has done; written under its lock.

    Attributes:
        rows, erased: that changed something here; ``unchanged`` rows came again.
        pages, reopened: pages applied, and cursors opened again after a loss.
        freshness: slots by the age of their oldest change when it became visible, bucket i up to FRESHNESS_SEC[i], the
            last one beyond.
        freshness_sum_sec: of all these ages.
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
    """How far a row must have changed to be sent at once. A row that has changed less waits.

    Args:
        updates: a row is sent when it was written so often since it was last sent; 0: not counted.
        move: a row is sent when its weights are further than this (L2) from those last sent; 0: not measured.
        longest_sec: a row is sent when it has waited so long: no row stays behind for longer.

    Raises:
        InvalidArgument: a value is out of range.
    """

    updates: int = 0
    move: float = 0.0
    longest_sec: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.updates < 2**32 or not 0 <= self.move < float("inf") or not 0.001 <= self.longest_sec <= 3600:
            raise InvalidArgument(
                f"live sync: after {self.updates} updates, a move of {self.move}, {self.longest_sec} s; allowed: "
                "updates in [0, 2**32), move in [0, inf), seconds in [0.001, 3600]"
            )

    @property
    def is_on(self) -> bool:
        """Whether any row waits."""
        return self.updates > 0 or self.move > 0


NO_THRESHOLD = ThresholdOptions()


@dataclass(frozen=True)
class FollowOptions:
    """How a version follows.

    Args:
        coordinator: ``HOST:PORT`` of the training cluster.
        name: of this process among all followers of the cluster; begins the cursors' names.
        interval_sec: between one round over all slots and the next, at least: changes of one row in it are sent once.
            After a round that took long, the pause is longer, until a second has gone since it began.
        retry_sec: after a failure.
        threshold: which rows the training shards keep back for a while.
    """

    coordinator: str
    name: str
    interval_sec: float = 0.1
    retry_sec: float = 0.5
    threshold: ThresholdOptions = NO_THRESHOLD


class AnotherCluster(FailedPrecondition):
    """The coordinator is of another cluster than the one that trained the version."""


class Follower:
    """Keeps a version's store as the training cluster's rows are. Thread-safe; ``close`` ends its threads.

    Args:
        version: its store follows; no other code may write to it.
        owned: (slot_count) the slots of this process.
        options: the shards to follow, and how.

    Raises:
        Unavailable: the coordinator cannot be reached, or not every shard serves.
        FailedPrecondition: it is another cluster than the one that trained the version, or a table has another schema.
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
        self._turns = 0  # that are under way
        shards = _checked_shards(version, options.coordinator)
        self._threads = [
            threading.Thread(target=self._run, args=(shard,), name=f"sparserow-sync-{shard}", daemon=True)
            for shard in shards
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads; the shards forget the cursors at once when they can be reached."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_CALL_DEADLINE_SEC + 5)

    def stats(self) -> SyncStats:
        """What was done so far."""
        with self._lock:
            return SyncStats(**{**vars(self._stats), "freshness": list(self._stats.freshness)})

    def pause(self) -> None:
        """Applies nothing from the next page on; what changes meanwhile is kept for it."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Goes on after :meth:`pause`."""
        with self._lock:
            self._paused = False

    @property
    def is_paused(self) -> bool:
        """Whether it applies nothing now, because it was told so."""
        with self._lock:
            return self._paused

    @property
    def is_still(self) -> bool:
        """Whether it is paused, and the last page is applied."""
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
        """Why it does not follow now; empty when it does."""
        with self._lock:
            return "; ".join(self._problems.values())

    @property
    def is_superseded(self) -> bool:
        """Whether another cluster is at the coordinator's address now."""
        with self._lock:
            return self._is_superseded

    @property
    def is_complete(self) -> bool:
        """Whether it has had everything of every shard once, but for rows that its threshold keeps back."""
        with self._lock:
            return len(self._caught_up) == len(self._threads)

    @property
    def behind_sec(self) -> float:
        """Since it last had everything of every shard, but for rows that its threshold keeps back; infinity before the
        first time."""
        with self._lock:
            if len(self._caught_up) < len(self._threads):
                return float("inf")
            return time.monotonic() - min(self._caught_up.values())

    def _run(self, shard: int) -> None:
        # The key is this follower's alone: a later one, in this process or another, cannot show it.
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
        """Rounds over all slots, until it ends. A row that changed often since the last round is sent once, so the
        more there is to send, the longer the pause until the next one, as long as rows stay fresh."""
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
    """What proves that a cursor is this follower's; b"" before it was opened."""

    value: bytes = b""


class _ShardStream:
    """An open cursor at one shard. ``key`` takes what the shard gives, for the next stream."""

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
            raise Unavailable(f"shard {shard} has not registered")
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
                log.info("%s: the cursor ends by itself: %s", self._peer, error.code())
        self._channel.close()

    def turn(self) -> tuple[dict[str, Any] | None, bool]:
        """Reads a page and applies it: what came of it, None when there was none within a second; and whether it was
        the last page of a round: this store has everything then that the shard had when the round began, but for what
        is held back."""
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
                f"{self._acknowledged} of them by itself; it begins anew from what it has"
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
    """The training cluster's shards, once it is known to be the right one."""
    with ControlClient(coordinator) as control:
        view = control.cluster()
        _check_cluster(version, view.cluster_id)
        there = {schema.name: schema for schema in control.list_tables(version.namespace)}
    if view.slot_count != version.slot_count:
        raise FailedPrecondition(f"the cluster has {view.slot_count} slots, the model {version.slot_count}")
    for name, table in version.tables.items():
        schema = there.get(name)
        if schema is None:
            raise NotFound(f"table {version.namespace}/{name}: is not in the cluster at {coordinator} any more")
        if (schema.id, schema.version, schema.dim) != (table.schema.id, table.schema.version, table.schema.dim):
            raise FailedPrecondition(
                f"table {schema.full_name}: has dim {schema.dim} and schema version {schema.version} in training, "
                f"{table.schema.dim} and {table.schema.version} in {version.model}@{version.version}; publish it anew"
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
