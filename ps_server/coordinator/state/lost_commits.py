"""Counts the commits that are lost for good, once over all processes of a shard. The module does no I/O.

The process of a shard reports ranges of steps or sequences that it lacks and that were not sent again
(commit/lost_commits.h). The process that replaces it may report the same ranges, or others; a commit that is reported
twice counts once.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

MOST_RANGES = 65_536


class Whose(NamedTuple):
    """The worker and the shard of some commits; ``is_steps``: the commits are named by steps,
    otherwise by sequences.
    """

    shard: int
    job_id: int
    worker_id: int
    epoch: int
    is_steps: bool


class LostCommits:
    """The ranges of lost commits, and the number that each shard has lost. Not thread-safe."""

    def __init__(self) -> None:
        self._ranges: dict[Whose, list[tuple[int, int]]] = {}  # (first, last) in ascending order; no two ranges touch
        self._kept = 0
        self._counts: dict[int, int] = {}

    def count(self, shard: int) -> int:
        """Returns the number of commits that a shard has lost."""
        return self._counts.get(shard, 0)

    def add(self, whose: Whose, first: int, last: int) -> int:
        """Adds the lost commits [first, last] and returns how many of them were not counted before.

        Beyond ``MOST_RANGES`` ranges, no new range is added: a loss that is not remembered could be counted again.
        """
        ranges = self._ranges.get(whose, [])
        begin = bisect.bisect_left(ranges, first - 1, key=lambda known: known[1])
        end = begin
        new = last - first + 1
        merged = (first, last)
        while end < len(ranges) and ranges[end][0] <= last + 1:
            low, high = max(ranges[end][0], first), min(ranges[end][1], last)
            new -= max(0, high - low + 1)
            merged = min(merged[0], ranges[end][0]), max(merged[1], ranges[end][1])
            end += 1
        if new <= 0 or (end == begin and self._kept >= MOST_RANGES):
            return 0
        self._kept += 1 - (end - begin)
        self._ranges[whose] = [*ranges[:begin], merged, *ranges[end:]]
        self._counts[whose.shard] = self.count(whose.shard) + new
        return new

    def to_document(self) -> dict[str, Any]:
        """Returns the saved form for the coordinator's state."""
        return {
            "counts": sorted(self._counts.items()),
            "ranges": [[*whose, ranges] for whose, ranges in sorted(self._ranges.items())],
        }

    @classmethod
    def of_document(cls, saved: dict[str, Any]) -> LostCommits:
        """Returns the lost commits of a saved form."""
        lost = cls()
        lost._counts = {int(shard): int(count) for shard, count in saved["counts"]}
        for shard, job_id, worker_id, epoch, is_steps, ranges in saved["ranges"]:
            lost._ranges[Whose(shard, job_id, worker_id, epoch, bool(is_steps))] = [
                (int(first), int(last)) for first, last in ranges
            ]
            lost._kept += len(ranges)
        return lost
