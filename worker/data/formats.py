"""The description of a text file's format for a reader. Each format has a factory, which ``data.format`` chooses.

A new format of text needs a function from a path to :class:`FileFormat` in a file of its own, a value of
``DataConfig.format``, and a case in ``sources/open_reader.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .line_layout import FieldKind, LineField, LineLayout


@dataclass(frozen=True)
class FileFormat:
    """The format of one file.

    Attributes:
        layout: the layout of its lines.
        header: whether its first line is a header.
    """

    layout: LineLayout
    header: bool


def fields_of(uses: Iterable[tuple[str, FieldKind]], names: Sequence[str]) -> tuple[LineField, ...]:
    """Returns the fields of a line that a job reads.

    Args:
        uses: the columns and what is made of each; all of them are among ``names``.
        names: the names of all fields of a line, in file order.
    """
    return tuple(LineField(names.index(name), name, kind) for name, kind in dict.fromkeys(uses))
