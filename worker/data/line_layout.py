"""The layout of a line of a click log, whatever the file's format; the decoder works by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class LineLayout:
    """The layout of one line.

    Invariants: positions are distinct and within ``columns``, and no position has two roles.

    Attributes:
        columns: the names of all fields of a line, in file order.
        label: the position of the label.
        label_values: the label, 0.0 or 1.0, for each allowed token.
        numeric: the positions that are decoded as numbers.
        categorical: the positions that are decoded as keys.
        delimiter: the delimiter of fields, one ASCII character.
        quote: the quote character; "": there is none. A quoted field may contain delimiters, but no line ends.
        comment: the text with which a comment line begins; "": there are no comments.
        trim: whether spaces around a field are dropped.
        missing: the tokens that mean "no value", besides the empty field.
        token: the allowed contents of a categorical field: "any", or "hex" for 1-8 hexadecimal digits.
    """

    columns: tuple[str, ...]
    label: int
    label_values: Mapping[str, float]
    numeric: tuple[int, ...]
    categorical: tuple[int, ...]
    delimiter: str = ","
    quote: str = ""
    comment: str = ""
    trim: bool = False
    missing: frozenset[str] = field(default_factory=frozenset)
    token: Literal["any", "hex"] = "any"

    @property
    def expected_labels(self) -> str:
        """The allowed label tokens, for error texts."""
        return " or ".join(repr(value) for value in self.label_values)
