"""The layout of a line of text, whatever the file's format; the decoder works by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

FieldKind: TypeAlias = Literal["label", "text", "number", "texts", "numbers"]


def typed_name(kind: FieldKind, name: str) -> str:
    """Returns the name of a decoded column: a field may be read both as a text and as a number."""
    return f"{kind} {name}"


@dataclass(frozen=True)
class LineField:
    """One use of a field of a line.

    Attributes:
        position: the position of the field in a line.
        name: the name of the field.
        kind: what is made of it: "label" a text as it is; "text" a text, "number" a number, and "texts" and "numbers"
            a list of them, null where the value is missing.
    """

    position: int
    name: str
    kind: FieldKind

    @property
    def typed_name(self) -> str:
        """The name of the decoded column."""
        return typed_name(self.kind, self.name)


@dataclass(frozen=True)
class LineLayout:
    """The layout of one line.

    Attributes:
        columns: the names of all fields of a line, in file order.
        fields: the uses of fields, at least one.
        delimiter: the delimiter of fields, one ASCII character.
        list_delimiter: the delimiter of the elements of a list within a field, one ASCII character.
        quote: the quote character; "": there is none. A quoted field may contain delimiters, but no line ends.
        comment: the text with which a comment line begins; "": there are no comments.
        trim: whether spaces around a field, and around an element of a list, are dropped.
        missing: the texts that mean "no value", besides the empty one.
        token: the allowed contents of a "text": "any", or "hex" for 1-8 hexadecimal digits.
    """

    columns: tuple[str, ...]
    fields: tuple[LineField, ...]
    delimiter: str = ","
    list_delimiter: str = "|"
    quote: str = ""
    comment: str = ""
    trim: bool = False
    missing: frozenset[str] = field(default_factory=frozenset)
    token: Literal["any", "hex"] = "any"
