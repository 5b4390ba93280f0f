"""A histogram of the last minutes, beside those that count since the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class RecentCounts:
    """Counts by bucket of at least the last ``part_sec``, and at most twice as long. It is not thread-safe.

    Args:
        buckets: the number of buckets.
        part_sec: the seconds after which a part is begun and the one before the last is forgotten.
        clock: returns monotonic time in seconds.
    """

    def __init__(self, buckets: int, part_sec: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._part_sec = part_sec
        self._clock = clock
        self._begun = clock()
        self._parts = [[0] * buckets, [0] * buckets]  # the part before, and the present one

    def add(self, counts: Sequence[int]) -> None:
        """Adds counts, one for each bucket."""
        self._turn()
        self._parts[1] = [a + b for a, b in zip(self._parts[1], counts, strict=True)]

    def counts(self) -> list[int]:
        """Returns the counts of the last minutes by bucket."""
        self._turn()
        return [a + b for a, b in zip(*self._parts, strict=True)]

    def _turn(self) -> None:
        passed = int((self._clock() - self._begun) / self._part_sec)
        for _ in range(min(passed, 2)):
            self._parts = [self._parts[1], [0] * len(self._parts[1])]
        self._begun += passed * self._part_sec
