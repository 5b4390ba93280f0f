"""Whether followers may see this shard's rows: not while tables are loaded, nor after a load that failed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ...proto import control_pb2 as pb
from ...proto.errors import DeadlineExceeded, Unavailable, error_of


class FollowGate:
    """Closed until the shard has been told its route. Thread-safe.

    Args:
        shard: its index.
    """

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._changed = threading.Condition()  # guards the two below
        self._looks = 0  # under way
        self._refusal = pb.Refusal(code=Unavailable.number, message=f"shard {shard} is not told its route yet")

    def close(self, refusal: pb.Refusal, deadline_sec: float) -> None:
        """Looks are refused from now on; returns when those under way have ended.

        Raises:
            DeadlineExceeded: one goes on for longer; looks are refused all the same.
        """
        with self._changed:
            self._refusal = refusal
            if not self._changed.wait_for(lambda: not self._looks, deadline_sec):
                raise DeadlineExceeded(f"shard {self._shard}: a page of changes was still being read")

    def open(self) -> None:
        """Ends the refusal."""
        with self._changed:
            self._refusal = pb.Refusal()

    @property
    def refused_tables(self) -> list[int]:
        """Ids of tables whose rows are refused."""
        with self._changed:
            return list(self._refusal.table_ids)

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """For the duration of the block, rows are as a follower may see them.

        Raises:
            Unavailable: tables are being loaded, or this shard has not been told its route yet.
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
