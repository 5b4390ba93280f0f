"""Decodes values of events, as lines of a file like them are decoded, and finds those that are malformed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .decoded import Lines, concatenate
from .line_windows import LinePosition, LineWindow
from .source import DecodedPart

_LINE_ENDS = bytes.maketrans(b"\n\r", b"  ")


class LinesDecoder(Protocol):
    """A source of files that decodes lines of text which are not in a file."""

    def decode_like(self, path: str, window: LineWindow) -> DecodedPart:
        """Decodes lines as those of a file; malformed ones are left out and counted."""

    def none(self, path: str) -> Lines:
        """Returns no samples."""


@dataclass(frozen=True)
class DecodedValues:
    """What became of some values.

    Attributes:
        lines: the good ones, in order.
        is_good: of each value, whether it is among ``lines``, (n) bool.
        faults: what is wrong with the others, by their place; one that is blank has none.
    """

    lines: Lines
    is_good: npt.NDArray[np.bool_]
    faults: dict[int, str]

    def cut(self, begin: int, end: int, good: int) -> DecodedValues:
        """Returns those in [begin, end), where ``good`` of the values before them are good ones."""
        is_good = self.is_good[begin:end]
        lines = self.lines.take(slice(good, good + int(is_good.sum())))
        faults = {at - begin: reason for at, reason in self.faults.items() if begin <= at < end}
        return DecodedValues(lines, is_good, faults)


class EventDecoder:
    """Decodes values, each of which is a line: a JSON object, or fields of delimited text.

    Args:
        source: decodes lines, and skips malformed ones.
        like: a file of such lines, whose types of columns are taken.
        line_of: writes a value as a line; None: it is none.
    """

    def __init__(self, source: LinesDecoder, like: str, line_of: Callable[[bytes], bytes | None]) -> None:
        self._source, self._like, self._line_of = source, like, line_of

    def none(self) -> Lines:
        """Returns no samples."""
        return self._source.none(self._like)

    def decode(self, values: Sequence[bytes], name: str) -> DecodedValues:
        """Decodes values. Only where one of them is malformed are they decoded in halves.

        Args:
            values: the values.
            name: where they are from, for error texts.
        """
        lines = [self._line_of(value) for value in values]
        is_good = np.ones(len(values), dtype=np.bool_)
        faults: dict[int, str] = {}
        found: list[Lines] = []
        left = [(0, len(lines))]
        while left:
            begin, end = left.pop()
            if begin == end:
                continue
            some = [line for line in lines[begin:end] if line is not None]
            text = b"".join(line + b"\n" for line in some)
            part = self._source.decode_like(self._like, LineWindow(name, LinePosition(0, 1), text, len(some)))
            if len(part.lines) == end - begin:
                found.append(part.lines)
            elif end - begin == 1:
                is_good[begin] = False
                if lines[begin] is None:
                    faults[begin] = "it is no message, or has several lines"
                elif part.first_bad is not None:
                    faults[begin] = str(part.first_bad).partition(": ")[2]
            else:
                middle = (begin + end) // 2
                left += [(middle, end), (begin, middle)]
        return DecodedValues(concatenate([self.none(), *found]), is_good, faults)


def json_line(value: bytes) -> bytes:
    """Returns a value of JSON, in which line ends are white space, as one line."""
    return value.translate(_LINE_ENDS)


def text_line(value: bytes) -> bytes | None:
    """Returns a value of delimited text without its line end; None: it has several lines."""
    line = value.removesuffix(b"\n").removesuffix(b"\r")
    return None if b"\n" in line or b"\r" in line else line
