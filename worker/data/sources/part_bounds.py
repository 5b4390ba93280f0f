"""What holds of a part of a file with types before its columns are used: how large it may become, and that it is whole.

Arrow trusts the bytes of a file: an offset or an index that leads out of its array is read where it leads.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyarrow import types

from ....proto.errors import DataLoss

_MOST_BYTES, _MOST_INFLATION = 1 << 30, 64
_BYTES_A_CELL = 8  # that samples are decoded to
_BYTES_OF_TEXTS = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def check_size(where: str, stored: int, rows: int, columns: int, inflated: int) -> None:
    """Checks how large a part becomes.

    Args:
        where: the file and the part, which begin the error text.
        stored: the bytes that the file has of it.
        rows: the number of its rows, as the file says.
        columns: the number of columns that are read.
        inflated: the bytes that these take when they are inflated, as the file says.

    Raises:
        DataLoss: it becomes larger than 1 GiB, and than 64 times what the file has of it.
    """
    allowed = max(_MOST_BYTES, _MOST_INFLATION * stored)
    made = max(inflated, rows * (columns + 1) * _BYTES_A_CELL)  # a row has a number as well
    if rows < 0 or inflated < 0 or made > allowed:
        raise DataLoss(
            f"{where} has {rows} rows and makes {made} bytes of {stored}; allowed: at most {allowed} bytes; write "
            "smaller parts, or check where the file is from"
        )


def checked(path: str, table: Any) -> Any:
    """Returns a table whose offsets, lengths and indices stay within their arrays; texts may have any bytes.

    Args:
        path: the path of its file.
        table: the table, as Arrow read it.

    Raises:
        DataLoss: one of them does not; the text names the column.
    """
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            for chunk in column.chunks:
                _of_bytes(chunk).validate(full=True)
        except pa.ArrowException as error:
            raise DataLoss(f"{path}: column {name} is damaged: {' '.join(str(error).split())}") from error
    return table


def _of_bytes(array: Any) -> Any:
    """Returns an array with bytes in place of texts, as a job may read texts of any encoding."""
    if not types.is_dictionary(array.type):
        return array.view(_bytes_type(array.type))
    return pa.DictionaryArray.from_arrays(array.indices, _of_bytes(array.dictionary), safe=False)


def _bytes_type(kind: Any) -> Any:
    if types.is_list(kind):
        return pa.list_(_bytes_type(kind.value_type))
    if types.is_large_list(kind):
        return pa.large_list(_bytes_type(kind.value_type))
    return _BYTES_OF_TEXTS.get(kind, kind)
