"""Which commits are lost for good: one count over all processes of a shard. No I/O.

A shard's process tells ranges of steps or sequences that it lacks and that were not sent again (commit/lost_commits.h).
The process that takes its place may find the same ones, or others; what is found twice counts once.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

MOST_RANGES = 65_536


class Whose(NamedTuple):
    """A worker's commits to one shard; ``is_steps``: named by their steps, else by their sequences."""

    shard: int
    job_id: int
    worker_id: int
    epoch: int
    is_steps: bool


class LostCommits:
    """Ranges of lost commits, and how many each shard has lost. Not thread-safe."""

    def __init__(self) -> None:
        self._ranges: dict[Whose, list[tuple[int, int]]] = {}  # (first, last), ascending, none touches another
        self._kept = 0
        self._counts: dict[int, int] = {}

    def count(self, shard: int) -> int:
        """Commits that a shard has lost."""
        return self._counts.get(shard, 0)

    def add(self, whose: Whose, first: int, last: int) -> int:
        """Returns how many of [first, last] were not counted before.

        Beyond ``MOST_RANGES`` ranges none is added: a loss that is not remembered could be counted again.
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
        """For the coordinator's saved state."""
        return {
            "counts": sorted(self._counts.items()),
            "ranges": [[*whose, ranges] for whose, ranges in sorted(self._ranges.items())],
        }

    @classmethod
    def of_document(cls, saved: dict[str, Any]) -> LostCommits:
        """What :meth:`to_document` gave."""
        lost = cls()
        lost._counts = {int(shard): int(count) for shard, count in saved["counts"]}
        for shard, job_id, worker_id, epoch, is_steps, ranges in saved["ranges"]:
            lost._ranges[Whose(shard, job_id, worker_id, epoch, bool(is_steps))] = [
                (int(first), int(last)) for first, last in ranges
            ]
            lost._kept += len(ranges)
        return lost
