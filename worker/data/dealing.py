"""Deals the samples of an epoch to workers, so that all take equally many steps; closed forms of plain numbers.

What is left of the epoch's order is cut in one of two ways:

* In runs: each worker gets one run of neighbouring samples, so that it reads few parts that another worker reads.
* In order: step s takes the next world x batch_size samples, and each worker a batch of them.

The numbers of samples of two workers differ by at most one batch in order, and by at most one sample in runs.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]  # the first position in the epoch's order, and the one after the last


@dataclass(frozen=True)
class Dealing:
    """How the samples that are left of an epoch go to the workers.

    Attributes:
        left: the positions that are dealt, as ascending intervals.
        world: the number of workers.
        batch_size: the number of samples in a batch of one worker.
        in_order: whether steps take the samples in their order; False: workers get runs.
    """

    left: tuple[Interval, ...]
    world: int
    batch_size: int
    in_order: bool

    @property
    def samples(self) -> int:
        """The number of samples that are dealt."""
        return sum(end - begin for begin, end in self.left)

    @property
    def batches(self) -> int:
        """The number of batches of every worker; the last ones may be short or empty."""
        if self.in_order:
            return _ceil(self.samples, self.world * self.batch_size)
        return _ceil(_ceil(self.samples, self.world), self.batch_size)

    def shares(self, rank: int, begin_batch: int = 0) -> Iterator[list[Interval]]:
        """Yields the positions of each batch of a worker, from batch ``begin_batch`` on."""
        begins = self._begins()
        for batch in range(begin_batch, self.batches):
            yield self._positions(begins, *self._batch(rank, batch))

    def left_after(self, batches: Sequence[int]) -> tuple[Interval, ...]:
        """Returns the positions that are left when each worker has done a number of batches, as ascending intervals.

        Args:
            batches: the number of batches of each worker, by rank.
        """
        begins = self._begins()
        if self.in_order:
            least, most = min(batches), max(batches)
            runs = [
                self._batch(rank, batch)
                for batch in range(least, most)
                for rank in range(self.world)
                if batches[rank] <= batch
            ]
            runs.append((min(most * self.world * self.batch_size, self.samples), self.samples))
        else:
            runs = [
                (min(self._run(rank)[0] + done * self.batch_size, self._run(rank)[1]), self._run(rank)[1])
                for rank, done in enumerate(batches)
            ]
        return merged(itertools.chain.from_iterable(self._positions(begins, *run) for run in runs))

    def _run(self, rank: int) -> Interval:
        return self.samples * rank // self.world, self.samples * (rank + 1) // self.world

    def _batch(self, rank: int, batch: int) -> Interval:
        """Returns the batch of a worker, counted in the samples that are dealt."""
        if not self.in_order:
            first, end = self._run(rank)
            return min(first + batch * self.batch_size, end), min(first + (batch + 1) * self.batch_size, end)
        step = self.world * self.batch_size
        first = batch * step
        rows = min(step, self.samples - first)
        if rows == step:
            return first + rank * self.batch_size, first + (rank + 1) * self.batch_size
        return first + rows * rank // self.world, first + rows * (rank + 1) // self.world

    def _begins(self) -> list[int]:
        """Returns how many dealt samples lie before each interval, and in all."""
        return list(itertools.accumulate((end - begin for begin, end in self.left), initial=0))

    def _positions(self, begins: list[int], first: int, end: int) -> list[Interval]:
        """Returns the positions of neighbouring dealt samples."""
        found: list[Interval] = []
        index = bisect.bisect_right(begins, first) - 1
        while first < end:
            begin = self.left[index][0] - begins[index]
            until = min(end, begins[index + 1])
            if first < until:
                found.append((begin + first, begin + until))
            first, index = until, index + 1
        return found


def _ceil(count: int, parts: int) -> int:
    return -(-count // parts)


def merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Returns disjoint intervals in ascending order; neighbours become one."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if begin == end:
            continue
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return tuple(found)
