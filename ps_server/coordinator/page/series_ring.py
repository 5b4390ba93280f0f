"""Series of numbers in a ring of fixed size: the newest points of each, and nothing grows. The module does no I/O."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence


class SeriesRing:
    """The newest points of ``width`` series, as float32. It is not thread-safe.

    Args:
        width: the number of series, at least 1.
        points: the number of points of each, at least 1; the oldest one goes when another comes.
    """

    def __init__(self, width: int, points: int) -> None:
        self.width, self.points = width, points
        self._values = array("f", [math.nan]) * (width * points)  # point after point
        self._next = 0
        self._count = 0

    @property
    def nbytes(self) -> int:
        """The bytes of all points, from the beginning on."""
        return len(self._values) * self._values.itemsize

    def __len__(self) -> int:
        return self._count

    def add(self, values: Sequence[float | None]) -> None:
        """Adds a point to each series; None is a gap.

        Args:
            values: the points, ``width`` of them.
        """
        assert len(values) == self.width, "a point for each series"
        begin = self._next * self.width
        point = array("f", [math.nan if value is None else value for value in values])
        self._values[begin : begin + self.width] = point
        self._next = (self._next + 1) % self.points
        self._count = min(self._count + 1, self.points)

    def clear(self, series: Iterable[int]) -> None:
        """Makes all points of some series gaps, so that another thing may have its place."""
        for each in series:
            self._values[each :: self.width] = array("f", [math.nan]) * self.points

    def series(self, index: int) -> list[float | None]:
        """Returns the points of a series, the oldest first; gaps and what is no number are None."""
        column = self._values[index :: self.width]
        begin = self._next if self._count == self.points else 0
        ordered = (column[begin:] + column[:begin])[: self._count]
        return [_rounded(value) for value in ordered]

    def means(self, index: int, group: int) -> list[float | None]:
        """Returns the means of each ``group`` points of a series, the oldest first; the newest group is whole."""
        points = self.series(index)
        first = len(points) % group
        groups = [points[begin : begin + group] for begin in range(first, len(points), group)]
        return [_mean([point for point in each if point is not None]) for each in groups]


def _mean(values: Sequence[float]) -> float | None:
    return _rounded(sum(values) / len(values)) if values else None


def _rounded(value: float) -> float | None:
    """Returns a value in the six digits that float32 has, which makes its text short; None for what is no number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
