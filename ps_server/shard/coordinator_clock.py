"""Compares the clock of this shard with that of its coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable


class CoordinatorClock:
    """The time of the coordinator, as its last heartbeat had it. Thread-safe.

    Args:
        now: returns this shard's time, in seconds since 1970.
        monotonic: returns seconds of a clock that cannot be set.
    """

    def __init__(self, now: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now, self._monotonic = now, monotonic
        self._offset_at_zero: float | None = None  # of the coordinator's clock from the monotonic clock, in seconds

    def heard(self, unix_sec: float) -> None:
        """Notes the coordinator's time; 0 is from a coordinator that does not send it."""
        self._offset_at_zero = unix_sec - self._monotonic() if unix_sec > 0 else None

    def difference_sec(self) -> float:
        """Returns by how much this shard's clock is ahead, in seconds; 0 while the coordinator's time is not known.

        A clock that was set since the last heartbeat shows, because the monotonic clock counts the time since then.
        """
        offset = self._offset_at_zero
        return 0.0 if offset is None else self._now() - (offset + self._monotonic())
