"""Splits a window of text without quotes into lines, and finds those that have all fields, without Python for each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .line_windows import LinePosition, LineWindow

_NEWLINE = 10
_BLANKS = b" \t\r"


class SplitLines:
    """The lines of a window; blank ones are left out.

    Args:
        window: the window. A carriage return that ends no line is a part of its field.
        delimiter: the delimiter of fields, one byte that is no blank, or a tab.
        columns: the number of fields of a line.

    Attributes:
        whole: the lines that have all fields, each with its line end.
        numbers: their numbers, (n) int64.
        bad: the numbers of the others, (m) int64.
    """

    def __init__(self, window: LineWindow, delimiter: bytes, columns: int) -> None:
        self._window = window
        text = window.text if window.text.endswith(b"\n") else window.text + b"\n"
        data = np.frombuffer(text, np.uint8)
        self._ends = np.flatnonzero(data == _NEWLINE) + 1
        begins = np.concatenate([[0], self._ends[:-1]])
        places = np.flatnonzero(data == delimiter[0])
        found = np.searchsorted(places, self._ends) - np.searchsorted(places, begins)
        is_whole = found == columns - 1
        # Some lines that lack fields are blank, and some of all lines of one field.
        blanks = _BLANKS.replace(delimiter, b"")
        may_be_blank = np.flatnonzero((found == 0) | (self._ends - begins <= columns + 1))
        is_blank = np.zeros(len(begins), dtype=np.bool_)
        for at in may_be_blank.tolist():
            is_blank[at] = not text[begins[at] : self._ends[at] - 1].strip(blanks)
        kept = is_whole & ~is_blank
        first = window.place.line
        self.numbers: npt.NDArray[np.int64] = np.flatnonzero(kept) + first
        self.bad: npt.NDArray[np.int64] = np.flatnonzero(~is_whole & ~is_blank) + first
        self.whole = text if kept.all() else data[np.repeat(kept, self._ends - begins)].tobytes()

    def window_of(self, number: int) -> LineWindow:
        """Returns the line of a number as a window of its own."""
        at = number - self._window.place.line
        begin = 0 if at == 0 else int(self._ends[at - 1])
        place = LinePosition(self._window.place.offset + begin, number)
        return LineWindow(self._window.path, place, self._window.text[begin : int(self._ends[at])], 1)
