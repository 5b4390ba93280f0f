"""Counts the commits that are lost for good, once over all processes of a shard. The module does no I/O.

The process of a shard reports ranges of steps or sequences that it lacks and that were not sent again
(commit/lost_commits.h). The process that replaces it may report the same ranges, or others; a commit that is reported
twice counts once. Of a worker that has left the number alone is known (departed_workers.py), or nothing.
"""

from __future__ import annotations

import bisect
from collections import Counter
from typing import Any, NamedTuple, TypeAlias

MOST_RANGES = 65_536
MOST_WORKERS = 4_096

Worker: TypeAlias = tuple[int, int, int, int]  # shard, job, worker, epoch


class CommitOwner(NamedTuple):
    """The worker and the shard of some commits; ``is_steps``: the commits are named by steps,
    otherwise by sequences.
    """

    shard: int
    job_id: int
    worker_id: int
    epoch: int
    is_steps: bool

    @property
    def worker(self) -> Worker:
        """The worker and the shard."""
        return self[:4]


class LostCommits:
    """The lost commits of each shard: their ranges, their numbers, and of whom they are not known. Not thread-safe."""

    def __init__(self) -> None:
        self._ranges: dict[CommitOwner, list[tuple[int, int]]] = {}  # (first, last), ascending; no two touch
        self._kept = 0
        self._sums: Counter[Worker] = Counter()  # of the ranges
        self._numbers: dict[Worker, int] = {}  # the numbers of workers that have left
        self._unknown: dict[int, set[tuple[int, int, int]]] = {}  # by shard: workers whose losses are not known
        self._unknown_more: Counter[int] = Counter()  # by shard: how many more there are
        self._counts: dict[int, int] = {}
        self._torn: dict[int, set[str]] = {}  # by shard: namespaces

    def count(self, shard: int) -> int:
        """Returns the number of commits that a shard has lost, of those that are known."""
        return self._counts.get(shard, 0)

    def unknown(self, shard: int) -> int:
        """Returns the number of workers of whose commits a shard lacks an unknown number."""
        return len(self._unknown.get(shard, ())) + self._unknown_more[shard]

    def torn(self, shard: int) -> list[str]:
        """Returns the namespaces whose tables have rows of an older instant on this shard than on others."""
        return sorted(self._torn.get(shard, ()))

    def tear(self, shard: int, namespace: str) -> None:
        """Notes that a shard lacks commits to the tables of a namespace."""
        self._torn.setdefault(shard, set()).add(namespace)

    def restored(self, namespace: str | None) -> None:
        """Notes that the rows of a namespace, or of all (None), are of one instant again. Counts stay."""
        for torn in self._torn.values():
            torn.clear() if namespace is None else torn.discard(namespace)

    def add(self, owner: CommitOwner, first: int, last: int) -> int:
        """Adds the lost commits [first, last] and returns how many of them were not counted before.

        Beyond ``MOST_RANGES`` ranges, no new range is added: a loss that is not remembered could be counted again.
        """
        ranges = self._ranges.get(owner, [])
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
        self._ranges[owner] = [*ranges[:begin], merged, *ranges[end:]]
        before = self._of(owner.worker)
        self._sums[owner.worker] += new
        return self._count(owner.worker, before)

    def add_number(self, worker: Worker, lost: int) -> int:
        """Notes how many commits of a worker that has left a shard lacks, and returns how many were not counted before.

        Those that the worker or the shard named as ranges are among them. Beyond ``MOST_WORKERS`` a worker's losses are
        unknown.
        """
        if lost <= 0:
            return 0
        if worker not in self._numbers and len(self._numbers) >= MOST_WORKERS:
            self.add_unknown(worker[0], worker[1:])
            return 0
        before = self._of(worker)
        self._numbers[worker] = max(lost, self._numbers.get(worker, 0))
        return self._count(worker, before)

    def add_unknown(self, shard: int, worker: tuple[int, int, int] | None, more: int = 0) -> None:
        """Notes that a shard lacks an unknown number of commits of a worker, or of so many more workers."""
        known = self._unknown.setdefault(shard, set())
        if worker is not None and worker not in known:
            if len(known) < MOST_WORKERS:
                known.add(worker)
            else:
                more = self._unknown_more[shard] + 1
        self._unknown_more[shard] = max(self._unknown_more[shard], more)

    def _of(self, worker: Worker) -> int:
        return max(self._sums[worker], self._numbers.get(worker, 0))

    def _count(self, worker: Worker, before: int) -> int:
        new = self._of(worker) - before
        self._counts[worker[0]] = self.count(worker[0]) + new
        return new

    def to_document(self) -> dict[str, Any]:
        """Returns the saved form for the coordinator's state."""
        return {
            "counts": sorted(self._counts.items()),
            "ranges": [[*owner, ranges] for owner, ranges in sorted(self._ranges.items())],
            "numbers": [[*worker, number] for worker, number in sorted(self._numbers.items())],
            "unknown": [[shard, sorted(workers)] for shard, workers in sorted(self._unknown.items())],
            "unknown_more": sorted(self._unknown_more.items()),
            "torn": [[shard, sorted(names)] for shard, names in sorted(self._torn.items())],
        }

    @classmethod
    def of_document(cls, saved: dict[str, Any]) -> LostCommits:
        """Returns the lost commits of a saved form."""
        lost = cls()
        lost._counts = {int(shard): int(count) for shard, count in saved["counts"]}
        for shard, job_id, worker_id, epoch, is_steps, ranges in saved["ranges"]:
            owner = CommitOwner(shard, job_id, worker_id, epoch, bool(is_steps))
            lost._ranges[owner] = [(int(first), int(last)) for first, last in ranges]
            lost._sums[owner.worker] += sum(int(last) - int(first) + 1 for first, last in ranges)
            lost._kept += len(ranges)
        lost._numbers = {(shard, job, worker, epoch): number for shard, job, worker, epoch, number in saved["numbers"]}
        lost._unknown = {shard: {(job, worker, epoch) for job, worker, epoch in of} for shard, of in saved["unknown"]}
        lost._unknown_more = Counter(dict(saved["unknown_more"]))
        lost._torn = {shard: set(names) for shard, names in saved["torn"]}
        return lost
