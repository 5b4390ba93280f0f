"""A line that is not what the layout says: an error with its place, or a count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ...proto.errors import InvalidArgument

_SHOWN_CHARACTERS = 40


def shown(token: bytes) -> str:
    """A field as an error message shows it: printable and short."""
    text = token.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")


class BadLine(InvalidArgument):
    """A malformed data line: file, line (1-based), column and what was expected.

    Attributes:
        path: the file.
        line: 1-based line number in it.
        column: name of the column, or None when the line as a whole is wrong.
    """

    def __init__(self, path: str, line: int, column: str | None, problem: str) -> None:
        place = f"{path}, line {line}" + (f", column {column}" if column is not None else "")
        super().__init__(f"{place}: {problem}")
        self.path, self.line, self.column = path, line, column
        self._problem = problem

    def __reduce__(self) -> tuple[type[BadLine], tuple[str, int, str | None, str]]:
        """Ray and multiprocessing carry errors from process to process."""
        return BadLine, (self.path, self.line, self.column, self._problem)


@dataclass
class BadLinePolicy:
    """``error`` raises at the first bad line; ``skip`` drops the line and counts it.

    Attributes:
        count: bad lines skipped so far in this pass.
        first: the first of them.
    """

    on_bad_line: Literal["error", "skip"] = "error"
    count: int = 0
    first: BadLine | None = field(default=None, repr=False)

    def meet(self, bad: BadLine) -> None:
        """Counts ``bad``.

        Raises:
            BadLine: when the policy is ``error``.
        """
        if self.on_bad_line == "error":
            raise bad
        self.count += 1
        self.first = self.first or bad
