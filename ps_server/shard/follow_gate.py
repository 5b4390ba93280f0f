"""Keeps followers from rows of tables while these are loaded, and after a load that failed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from ...proto import control_pb2 as pb
from ...proto.errors import DeadlineExceeded, Unavailable, error_of


class FollowGate:
    """A gate for followers, which is closed until the shard has its route, and then for refused tables. Thread-safe.

    Args:
        shard: the index of the shard.
    """

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._changed = threading.Condition()  # guards the two fields below
        self._looks: list[frozenset[int]] = []  # the tables of each look under way; none: all
        self._refusal = pb.Refusal(code=Unavailable.number, message=f"shard {shard} has no route yet")

    def close(self, refusal: pb.Refusal, deadline_sec: float) -> None:
        """Refuses looks at these tables from now on, and returns when such looks under way have ended.

        Args:
            refusal: the error that looks get, and the tables.
            deadline_sec: how long to wait for the looks under way, in seconds.

        Raises:
            DeadlineExceeded: a look takes longer; looks are refused all the same.
        """
        with self._changed:
            self._refusal = refusal
            if not self._changed.wait_for(lambda: not any(map(self._is_refused, self._looks)), deadline_sec):
                raise DeadlineExceeded(f"shard {self._shard}: a page of changes was still being read")

    def open(self) -> None:
        """Admits all looks again."""
        with self._changed:
            self._refusal = pb.Refusal()

    @property
    def refused_tables(self) -> list[int]:
        """The ids of tables whose rows are refused."""
        with self._changed:
            return list(self._refusal.table_ids)

    def _is_refused(self, tables: frozenset[int]) -> bool:
        refused = self._refusal.table_ids
        return bool(self._refusal.code) and (not refused or not tables or not tables.isdisjoint(refused))

    @contextlib.contextmanager
    def look(self, tables: Iterable[int]) -> Iterator[None]:
        """Admits the caller to the rows of some tables for the duration of the block.

        Args:
            tables: the ids of the tables; none: all.

        Raises:
            Unavailable: one of the tables is being loaded, or this shard has no route yet.
            FailedPrecondition: the last restore of one of the tables failed.
        """
        wanted = frozenset(tables)
        with self._changed:
            if self._is_refused(wanted):
                raise error_of(self._refusal.code, self._refusal.message)
            self._looks.append(wanted)
        try:
            yield
        finally:
            with self._changed:
                self._looks.remove(wanted)
                self._changed.notify_all()
