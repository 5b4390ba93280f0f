"""The format of the Criteo click logs: a label, 13 numbers I1..I13 and 26 hexadecimal tokens C1..C26.

Both published forms are read: tab-separated without a header, and comma-separated with the header
``label,I1,...,C26`` in any order. The first line decides which form a file has. Missing values are empty fields.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...proto.config.criteo_columns import CRITEO_CATEGORICAL, CRITEO_NUMERIC
from ...proto.errors import InvalidArgument
from .formats import FileFormat, fields_of
from .line_layout import FieldKind, LineLayout
from .line_windows import first_line

LABEL = "label"
COLUMNS = (LABEL, *CRITEO_NUMERIC, *CRITEO_CATEGORICAL)


def criteo_format(path: str, uses: Iterable[tuple[str, FieldKind]]) -> FileFormat:
    """Returns the format of a Criteo file, which its first line shows.

    Args:
        path: the path of the file.
        uses: the columns that are read, of ``COLUMNS``, and what is made of each.

    Raises:
        NotFound, DataLoss: the file cannot be read.
        InvalidArgument: the file is empty, or its first line does not have the 40 columns.
    """
    line = first_line(path).decode("utf-8", "replace")
    if not line.strip():
        raise InvalidArgument(f"{path}, line 1: empty; expected {len(COLUMNS)} Criteo columns")
    delimiter = "\t" if "\t" in line else ","
    fields = [field.strip() for field in line.split(delimiter)]
    header = fields[0] not in ("0", "1") and LABEL in fields
    if len(fields) != len(COLUMNS):
        raise InvalidArgument(
            f"{path}, line 1: {len(fields)} columns, expected {len(COLUMNS)}: a label, 13 numbers and 26 "
            "hexadecimal tokens, separated by tabs, or by commas under a header"
        )
    if header and (absent := sorted(set(COLUMNS) - set(fields))):
        raise InvalidArgument(
            f"{path}, line 1: the header lacks the column {absent[0]}; expected {LABEL}, I1..I13, C1..C26"
        )
    names = tuple(fields) if header else COLUMNS
    layout = LineLayout(columns=names, fields=fields_of(uses, names), delimiter=delimiter, token="hex")
    return FileFormat(layout, header)
