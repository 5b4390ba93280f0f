"""Gathers the samples at positions of an epoch's order from the parts of the files.

A shuffled window is decoded as a whole and kept until another one is asked for. A part is kept until the next one is
decoded, since windows share the part in which one ends and the next begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .bad_line import BadLine
from .dealing import Interval
from .decoded import Lines, concatenate
from .sample_order import SampleOrder
from .source import DecodedPart, PlannedFile, Source

_BLANK, _BAD = -1, -2


@dataclass(frozen=True)
class Samples:
    """Good samples in their order.

    Attributes:
        lines: the good samples.
        positions: the position of each in the order of the epoch, (n) int64.
        bad: the number of malformed samples among the positions that were asked for.
        first_bad: one of them, with its place; None: there was none.
    """

    lines: Lines
    positions: npt.NDArray[np.int64]
    bad: int = 0
    first_bad: BadLine | None = None


@dataclass(frozen=True)
class _Line:
    """Neighbouring places of the line of parts.

    Attributes:
        lines: the good samples in their order.
        rows: the row in ``lines`` of each place, or that it is blank or malformed, (n) int64; None: all are good.
        first_bad: a malformed sample among the parts; None: there was none.
    """

    lines: Lines
    rows: npt.NDArray[np.int64] | None
    first_bad: BadLine | None

    def take(self, places: npt.NDArray[np.int64], begin: int) -> Samples:
        """Returns the samples at some places.

        Args:
            places: the places.
            begin: the position of the first of them in the order of the epoch; the others follow it.
        """
        positions = np.arange(begin, begin + len(places))
        if self.rows is None:
            return Samples(self.lines.take(places), positions)
        rows = self.rows[places]
        bad, is_good = int((rows == _BAD).sum()), rows >= 0
        return Samples(self.lines.take(rows[is_good]), positions[is_good], bad, self.first_bad if bad else None)


@dataclass(frozen=True)
class _Window:
    order: SampleOrder
    number: int
    line: _Line
    places: npt.NDArray[np.int64]  # of its samples in their order


class PartReader:
    """Reads parts of files, and keeps the last of them. Not thread-safe.

    Args:
        source: decodes the files.
        files: the files.
    """

    def __init__(self, source: Source, files: Sequence[PlannedFile]) -> None:
        self._source = source
        self._files = files
        self._part: tuple[tuple[int, int], DecodedPart] | None = None
        self._window: _Window | None = None

    def decoded(self, file: int, part: int) -> DecodedPart:
        """Returns a decoded part.

        Raises:
            BadLine, NotFound, DataLoss: see :meth:`Source.read`.
        """
        if self._part is None or self._part[0] != (file, part):
            self._part = None  # the memory of the old one is free before the new one is decoded
            self._part = ((file, part), self._source.read(self._files[file], part))
        return self._part[1]

    def none(self) -> Lines:
        """Returns no samples."""
        return self._source.none(self._files[0].path)

    def samples(self, order: SampleOrder, share: Sequence[Interval]) -> Samples:
        """Returns the samples at positions of an order.

        Args:
            order: the order of an epoch; all calls for one epoch give the same object.
            share: the positions.
        """
        found = [piece for interval in share for piece in self._pieces(order, *interval)]
        if not found:
            return Samples(self.none(), np.empty(0, np.int64))
        if len(found) == 1:
            return found[0]
        firsts = [piece.first_bad for piece in found if piece.first_bad is not None]
        lines = concatenate([piece.lines for piece in found])
        positions = np.concatenate([piece.positions for piece in found])
        return Samples(lines, positions, sum(piece.bad for piece in found), firsts[0] if firsts else None)

    def _pieces(self, order: SampleOrder, begin: int, end: int) -> list[Samples]:
        """Returns the samples at [begin, end), by window when they are shuffled."""
        if not order.is_shuffled:
            self._window = None
            return [self._line(order, begin, end).take(np.arange(end - begin), begin)]
        found = []
        while begin < end:
            number, first, last = order.window_of(begin)
            window = self._window
            if window is None or window.order is not order or window.number != number:
                self._window = window = None  # the memory of the old one is free before the new one is decoded
                window = _Window(order, number, self._line(order, first, last), order.permutation(number))
                self._window = window
            until = min(end, last)
            found.append(window.line.take(window.places[begin - first : until - first], begin))
            begin = until
        return found

    def _line(self, order: SampleOrder, begin: int, end: int) -> _Line:
        parts: list[Lines] = []
        rows: list[npt.NDArray[np.int64]] = []
        first_bad, has_holes, good = None, False, 0
        for piece in order.slices(begin, end):
            part = self.decoded(piece.file, piece.part)
            length = len(part.lines)
            places = np.arange(piece.first, piece.end)
            first = min(piece.first, length)
            last = min(piece.end, length)
            parts.append(part.lines.take(slice(first, last)))
            if last - first < len(places):
                has_holes = True
                first_bad = first_bad or part.first_bad
            # The good samples of a part come first, then the malformed ones, then blank lines and comments.
            other = np.where(places < length + part.bad, _BAD, _BLANK)
            rows.append(np.where(places < length, places - first + good, other))
            good += last - first
        lines = concatenate(parts) if parts else self.none()
        return _Line(lines, np.concatenate(rows) if has_holes else None, first_bad)
