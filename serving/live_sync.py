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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..proto import control_pb2 as pb
from ..proto.control import ControlClient
from ..proto.errors import FailedPrecondition, InvalidArgument, SparserowError
from ..proto.request_names import MOST_NAME
from ..proto.schema import TableSchema
from ..proto.status.figures import quantile
from .follow_options import FollowOptions
from .loaded_version import LoadedVersion
from .recent_counts import RecentCounts
from .shard_stream import CALL_DEADLINE_SEC, AnotherCluster, CursorKey, ShardStream, check_cluster

log = logging.getLogger(__name__)

FRESHNESS_SEC: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)

_PAUSE_PER_BUSY = 20.0  # seconds of pause for each CPU second of this thread, which does a quarter of a round's work
_LONGEST_ROUND_SEC = 0.7  # the longest round with its pause, which bounds how long a change stays unseen
_PAUSED_LOOK_SEC = 0.02


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


class Follower:
    """Keeps a version's store up to date with the rows of the training cluster. Thread-safe.

    It has a thread for each training shard; ``close`` ends them.

    Args:
        version: the version whose store follows; no other code may write to the store.
        owned: whether this process owns each slot, (slot_count) bool.
        options: the cluster to follow, and how.

    Raises:
        Unavailable: the coordinator cannot be reached, or a shard does not serve.
        FailedPrecondition: the cluster is not the one that trained the version, or has none of its tables with the
            schema that they had.
    """

    def __init__(self, version: LoadedVersion, owned: NDArray[np.bool_], options: FollowOptions) -> None:
        self._version = version
        self._owned = owned
        self._options = options
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._stats = SyncStats()
        self._recent = RecentCounts(len(FRESHNESS_SEC) + 1)
        self._aliases = ""
        self._problems: dict[int, str] = {}
        # By shard: tables of the version that it does not have any more, or has with another dim or schema version.
        self._dropped: dict[int, frozenset[str]] = {}
        self._others: dict[int, dict[str, str]] = {}
        self._logged: set[type[SparserowError]] = set()  # the kinds of errors that the log has since all was well
        self._caught_up: dict[int, float] = {}
        self._is_superseded = False
        self._paused = False
        self._turns = 0  # the number of pages that are being read and applied
        shards, dropped, others = _checked_shards(version, options.coordinator)
        for shard in shards:
            self._note_tables(shard, dropped, others)
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
            thread.join(CALL_DEADLINE_SEC + 5)

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

    def name_aliases(self, aliases: Iterable[str]) -> None:
        """Notes the aliases that name the version, for the status of the cluster."""
        text = ", ".join(aliases)
        with self._lock:
            self._aliases = text if len(text) <= MOST_NAME else f"{text[: MOST_NAME - 1]}…"

    def _begin_turn(self) -> bool:
        with self._lock:
            self._turns += not self._paused
            return not self._paused

    def _end_turn(self) -> None:
        with self._lock:
            self._turns -= 1

    @property
    def problem(self) -> str:
        """The reason why the version, or a table of it, does not follow now; "" when all of it does."""
        with self._lock:
            return "; ".join((*self._problems.values(), *self._table_problems()))

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
        key = CursorKey()
        while not self._stop.is_set():
            try:
                with ShardStream(self._version, self._owned, self._options, shard, cursor, key) as stream:
                    self._follow(shard, stream)
            except SparserowError as error:
                if self._is_news(error) and not self._stop.is_set():
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

    def _follow(self, shard: int, stream: ShardStream) -> None:
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
                    applied, is_last = stream.turn(self._figures(shard))
                finally:
                    self._end_turn()
                self._set_problem(shard, "")
                if applied is not None:
                    self._count(shard, applied)
                    self._note_page(shard, applied)
            with self._lock:
                if is_last:
                    self._caught_up[shard] = begun
            busy = time.thread_time() - busy_before
            left = _LONGEST_ROUND_SEC - (time.monotonic() - begun)
            self._stop.wait(max(self._options.interval_sec, min(busy * _PAUSE_PER_BUSY, left)))

    def _figures(self, shard: int) -> pb.FollowerFigures:
        """Returns what the status of the cluster shows of this follower, said to a shard."""
        behind = self.behind_sec
        with self._lock:
            counts, aliases, caught_up = self._recent.counts(), self._aliases, self._caught_up.get(shard)
        p50, p99 = (quantile(FRESHNESS_SEC, counts, share) for share in (0.5, 0.99))
        return pb.FollowerFigures(
            behind_sec=None if behind == float("inf") else behind,
            fresh_p50_sec=p50,
            fresh_p99_sec=p99,
            goal_sec=self._options.freshness_goal_sec,
            aliases=aliases,
            shard_behind_sec=None if caught_up is None else time.monotonic() - caught_up,
        )

    def _note_page(self, shard: int, applied: dict[str, Any]) -> None:
        """Notes which tables of the version a shard has, as a page names them."""
        names = {table.schema.id: name for name, table in self._version.tables.items()}
        there, others = applied["tables"], applied["others"]
        follow = {names[each] for each in applied["applied_tables"] if each in names}
        with self._lock:
            dropped = (
                self._dropped[shard]
                if there is None
                else frozenset(names.values()) - {names[each] for each in there if each in names}
            )
            other = {name: text for name, text in self._others[shard].items() if name not in follow}
        texts = {names[each]: _text_of_schema(*schema) for each, schema in others.items() if each in names}
        other = {**{name: text for name, text in other.items() if name not in dropped}, **texts}
        self._note_tables(shard, dropped - follow - set(texts), other)

    def _note_tables(self, shard: int, dropped: frozenset[str], others: dict[str, str]) -> None:
        with self._lock:
            before = set(self._table_problems())
            self._dropped[shard], self._others[shard] = dropped, others
            news = [text for text in self._table_problems() if text not in before]
        for text in news:
            log.warning("live sync of %s: %s", self._version.model, text)

    def _table_problems(self) -> list[str]:
        """Returns what is reported of tables that do not follow; the caller has the lock."""
        others: dict[str, str] = {}
        for each in self._others.values():
            others.update(each)
        dropped = sorted(frozenset().union(*self._dropped.values()) - set(others))
        namespace = self._version.namespace
        return [
            *(f"table {namespace}/{name} was dropped in training; its rows stay as they were" for name in dropped),
            *(
                f"table {namespace}/{name} {text} in training; its rows stay as they were; publish it again"
                for name, text in sorted(others.items())
            ),
        ]

    def _count(self, shard: int, applied: dict[str, Any]) -> None:
        with self._lock:
            self._stats.pages += 1
            self._stats.rows += applied["rows"]
            self._stats.unchanged += applied["unchanged"]
            self._stats.erased += applied["erased"]
            if shard in self._caught_up:  # because what it caught up with is as old as the process is late
                self._count_freshness(applied["oldest_at_ms"])

    def _count_freshness(self, oldest_at_ms: NDArray[np.uint32]) -> None:
        known = oldest_at_ms[oldest_at_ms != 0]
        now = np.uint32(int(time.time() * 1000) & 0xFFFFFFFF)
        ages = (now - known).astype(np.int32).clip(0) / 1000.0
        counts = np.bincount(np.searchsorted(FRESHNESS_SEC, ages), minlength=len(self._stats.freshness))
        self._recent.add(counts.tolist())
        self._stats.freshness = [a + int(b) for a, b in zip(self._stats.freshness, counts, strict=True)]
        self._stats.freshness_sum_sec += float(ages.sum())

    def _set_problem(self, shard: int, problem: str) -> None:
        with self._lock:
            self._problems.pop(shard, None)
            if problem:
                self._problems[shard] = problem
            elif not self._problems:
                self._logged.clear()

    def _is_news(self, error: SparserowError) -> bool:
        """Whether an error has a kind that no shard has had since all of them were followed."""
        with self._lock:
            is_news = type(error) not in self._logged
            self._logged.add(type(error))
            return is_news


def _text_of_schema(dim: int, version: int) -> str:
    return f"has dim {dim} and schema version {version}"


def _checked_shards(version: LoadedVersion, coordinator: str) -> tuple[Sequence[int], frozenset[str], dict[str, str]]:
    """Checks that the training cluster is the one of the version.

    Returns:
        The numbers of its shards, the tables of the version that it has no more, and those that it has with another
        dim or schema version, with words about these.
    """
    with ControlClient(coordinator) as control:
        view = control.cluster()
        check_cluster(version, view.cluster_id)
        there = {schema.name: schema for schema in control.list_tables(version.namespace)}
    if view.slot_count != version.slot_count:
        raise FailedPrecondition(f"the cluster has {view.slot_count} slots, but the model has {version.slot_count}")
    dropped = frozenset(name for name in version.tables if name not in there)
    others = {
        name: _text_of_schema(there[name].dim, there[name].version)
        for name, table in version.tables.items()
        if name not in dropped and _key_of(there[name]) != _key_of(table.schema)
    }
    if version.tables and len(dropped) + len(others) == len(version.tables):
        name = min(version.tables)
        problem = f"{others[name]} there; publish it again" if name in others else "is not there any more"
        raise FailedPrecondition(
            f"no table of {version.model}@{version.version} can follow the cluster at {coordinator}: table "
            f"{version.namespace}/{name} {problem}"
        )
    if not view.shards:
        raise InvalidArgument(f"the cluster at {coordinator} has no shards")
    return [shard.index for shard in view.shards], dropped, others


def _key_of(schema: TableSchema) -> tuple[int, int, int]:
    return schema.id, schema.version, schema.dim
