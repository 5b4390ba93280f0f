"""The error for a malformed line or row, with its place, and the policy that raises it or counts it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ...proto.errors import InvalidArgument

_SHOWN_CHARACTERS = 40


def shown(token: bytes) -> str:
    """Returns a field in a printable and short form for error texts."""
    text = token.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")


class BadLine(InvalidArgument):
    """The error for a malformed data line; the text has its place and the expected form.

    Attributes:
        path: the path of the file.
        line: the number of the line or row, from 1.
        column: the name of the column; None when the line as a whole is wrong.
        unit: "line" or "row", the word for what ``line`` counts.
    """

    def __init__(self, path: str, line: int, column: str | None, problem: str, unit: str = "line") -> None:
        place = f"{path}, {unit} {line}" + (f", column {column}" if column is not None else "")
        super().__init__(f"{place}: {problem}")
        self.path, self.line, self.column, self.unit = path, line, column, unit
        self._problem = problem

    def __reduce__(self) -> tuple[type[BadLine], tuple[str, int, str | None, str, str]]:
        """Makes the error picklable, since Ray and multiprocessing send errors between processes."""
        return BadLine, (self.path, self.line, self.column, self._problem, self.unit)


@dataclass
class BadLinePolicy:
    """The policy for bad lines: ``error`` raises at the first one; ``skip`` drops bad lines and counts them.

    Attributes:
        on_bad_line: "error" or "skip".
        count: the number of bad lines skipped so far in this pass.
        first: the first bad line that was skipped; None: there was none.
    """

    on_bad_line: Literal["error", "skip"] = "error"
    count: int = 0
    first: BadLine | None = field(default=None, repr=False)

    def meet(self, bad: BadLine, count: int = 1) -> None:
        """Counts bad lines, or raises the first of them.

        Args:
            bad: the error of the first of them.
            count: how many there are.

        Raises:
            BadLine: the policy is ``error``.
        """
        if self.on_bad_line == "error":
            raise bad
        self.count += count
        self.first = self.first or bad
