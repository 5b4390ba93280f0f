"""What a line of a click log consists of, whatever the file's format: the input of the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class LineLayout:
    """Physical layout of one line.

    Invariants: positions are distinct, within ``columns``, and no position is in two roles.

    Attributes:
        columns: names of all fields of a line, in file order.
        label: position of the label.
        label_values: token -> label, 0.0 or 1.0.
        numeric: positions decoded as numbers.
        categorical: positions decoded as keys.
        delimiter: one ASCII character.
        quote: the quote character, or "" for none. A quoted field may hold delimiters, not line ends.
        comment: a line that begins with it is no data; "" for none.
        trim: whether spaces around a field are dropped.
        missing: tokens that mean "no value", besides the empty field.
        token: what a categorical field may hold: anything, or 1-8 hexadecimal digits.
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
        """The allowed label tokens, for messages."""
        return " or ".join(repr(value) for value in self.label_values)
