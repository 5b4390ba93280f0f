"""Keeps followers from rows of this shard while tables are loaded, and after a load that failed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ...proto import control_pb2 as pb
from ...proto.errors import DeadlineExceeded, Unavailable, error_of


class FollowGate:
    """A gate for followers, which is closed until the shard has its route. Thread-safe.

    Args:
        shard: the index of the shard.
    """

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._changed = threading.Condition()  # guards the two fields below
        self._looks = 0  # number of looks under way
        self._refusal = pb.Refusal(code=Unavailable.number, message=f"shard {shard} has no route yet")

    def close(self, refusal: pb.Refusal, deadline_sec: float) -> None:
        """Refuses looks from now on, and returns when the looks under way have ended.

        Args:
            refusal: the error that looks get.
            deadline_sec: how long to wait for the looks under way, in seconds.

        Raises:
            DeadlineExceeded: a look takes longer; looks are refused all the same.
        """
        with self._changed:
            self._refusal = refusal
            if not self._changed.wait_for(lambda: not self._looks, deadline_sec):
                raise DeadlineExceeded(f"shard {self._shard}: a page of changes was still being read")

    def open(self) -> None:
        """Admits looks again."""
        with self._changed:
            self._refusal = pb.Refusal()

    @property
    def refused_tables(self) -> list[int]:
        """The ids of tables whose rows are refused."""
        with self._changed:
            return list(self._refusal.table_ids)

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """Admits the caller to the rows for the duration of the block.

        Raises:
            Unavailable: tables are being loaded, or this shard has no route yet.
            FailedPrecondition: the last restore failed.
        """
        with self._changed:
            if self._refusal.code:
                raise error_of(self._refusal.code, self._refusal.message)
            self._looks += 1
        try:
            yield
        finally:
            with self._changed:
                self._looks -= 1
                self._changed.notify_all()
