"""The order of an epoch's samples: a pure function of (seed, epoch), whatever the number of workers.

The parts of all files form one line: of row groups, stripes, record batches, or runs of lines. With shuffling, the
files are permuted, and so are the parts of each file. The line is cut into *windows* of ``window_rows`` samples, and
the samples of each window are permuted. A position in an epoch is a place in this order, from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .source import PlannedFile

_PARTS_STREAM, _WINDOW_STREAM = 0, 1  # numbers that distinguish the random streams of an epoch


@dataclass(frozen=True)
class PartSlice:
    """Neighbouring samples of one part of a file.

    Attributes:
        file: the number of the file.
        part: the number of the part in the file.
        first: the first sample.
        end: the sample after the last one.
    """

    file: int
    part: int
    first: int
    end: int


class SampleOrder:
    """The order of one epoch.

    Args:
        files: the files with the samples of their parts.
        seed: the seed of every order.
        epoch: the number of the epoch, from 0.
        window_rows: the number of samples of a window.
        shuffle: whether samples are shuffled; False: they come in file order.
    """

    def __init__(self, files: Sequence[PlannedFile], *, seed: int, epoch: int, window_rows: int, shuffle: bool) -> None:
        self._seed, self._epoch, self._shuffle = seed, epoch, shuffle
        self._window_rows = window_rows
        order = list(range(len(files)))
        if shuffle:
            order = np.random.default_rng([seed, epoch]).permutation(len(files)).tolist()
        places = [self._parts(index, files[index]) for index in order]
        self._files = np.repeat(order, [len(parts) for parts in places])
        self._parts_in_line = np.concatenate([np.empty(0, np.int64), *places])
        rows = [files[index].rows[parts] for index, parts in zip(order, places, strict=True)]
        self._begins = np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *rows]))])

    def _parts(self, index: int, file: PlannedFile) -> npt.NDArray[np.int64]:
        parts = np.arange(len(file.rows))
        if not self._shuffle or file.is_sequential:
            return parts
        return np.random.default_rng([self._seed, self._epoch, _PARTS_STREAM, index]).permutation(parts)

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self._epoch

    @property
    def is_shuffled(self) -> bool:
        """Whether samples are shuffled."""
        return self._shuffle

    @property
    def samples(self) -> int:
        """The number of samples of the epoch."""
        return int(self._begins[-1])

    def window_of(self, position: int) -> tuple[int, int, int]:
        """Returns the number, the first position and the end of the window that holds a position."""
        number = position // self._window_rows
        begin = number * self._window_rows
        return number, begin, min(begin + self._window_rows, self.samples)

    def slices(self, begin: int, end: int) -> Iterator[PartSlice]:
        """Yields the parts of the line between two places, in order."""
        index = int(np.searchsorted(self._begins, begin, side="right")) - 1
        while begin < end:
            starts, ends = int(self._begins[index]), int(self._begins[index + 1])
            until = min(end, ends)
            if begin < until:
                part = int(self._parts_in_line[index])
                yield PartSlice(int(self._files[index]), part, begin - starts, until - starts)
            begin, index = max(begin, until), index + 1

    def permutation(self, number: int) -> npt.NDArray[np.int64]:
        """Returns where in the line of a window its samples lie, in their shuffled order, (window) int64."""
        _, begin, end = self.window_of(number * self._window_rows)
        return np.random.default_rng([self._seed, self._epoch, _WINDOW_STREAM, number]).permutation(end - begin)
