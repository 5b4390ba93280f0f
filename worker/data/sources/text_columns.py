"""Columns of text files for ``sparserow predict``, decoded as a job's readers decode them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ....proto.errors import InvalidArgument
from ....proto.features.base import CellKind
from ....proto.features.feature_set import FeatureSet
from ....proto.options.csv_dialect import CsvDialect
from ..bad_line import BadLinePolicy
from ..line_decoder import LineDecoder
from ..line_layout import FieldKind, typed_name
from ..line_windows import header_end, read_runs
from ..table_csv import csv_format, names_of
from .table_columns import kinds_of

FALLBACK = CsvDialect(header=True, quote='"')  # of features that were published without a dialect


class CsvColumns:
    """The columns of a file of delimited text.

    Args:
        path: the path of the file.
        features: what reads its cells.
        dialect: how the file writes its fields.

    Attributes:
        names: of all columns, in file order.

    Raises:
        InvalidArgument: a column is read as a list and as something else, or the file has another header.
        NotFound: the file does not exist.
    """

    def __init__(self, path: Path, features: FeatureSet, dialect: CsvDialect) -> None:
        self._path, self._dialect = str(path), dialect
        self.names: Sequence[str] = names_of(dialect, self._path)
        self._kinds = {name: _kind_of(name, kinds, self._path) for name, kinds in kinds_of(features).items()}

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields runs of rows of some columns, of any number of rows.

        Raises:
            InvalidArgument: a line is malformed; the text names it.
        """
        uses = [(name, "text" if kind == "integer" else kind) for name, kind in self._kinds_of(columns).items()]
        found = csv_format(self._dialect, self._path, uses)  # type: ignore[arg-type]
        decoder = LineDecoder(found.layout)
        for window in read_runs(self._path, header_end(self._path) if found.header else None):
            table, _ = decoder.decode(window, BadLinePolicy("error"))
            yield pa.table({name: self._column(table, name, kind) for name, kind in uses})

    def _kinds_of(self, columns: Sequence[str]) -> dict[str, str]:
        return {name: self._kinds.get(name, "text") for name in columns}

    def _column(self, table: Any, name: str, kind: str) -> Any:
        made = pa.concat_arrays(table.column(typed_name(kind, name)).chunks)  # type: ignore[arg-type]
        if kind == "texts":
            return pa.ListArray.from_arrays(made.offsets, _texts(made.values), mask=made.is_null())
        if kind != "text":
            return made
        return _integers(_texts(made), name, self._path) if self._kinds.get(name) == "integer" else _texts(made)


def _kind_of(name: str, kinds: set[CellKind], where: str) -> FieldKind | str:
    """Returns the one way in which a column is read; "integer" where its texts are keys and numbers."""
    if kinds == {"text", "number"}:
        return "integer"
    if len(kinds) > 1:
        raise InvalidArgument(
            f"{where}: column {name!r} is read as a list and as something else; use a file with types"
        )
    return next(iter(kinds))


def _texts(cells: Any) -> Any:
    return cells.view(pa.large_string()) if cells.type == pa.large_binary() else cells


def _integers(cells: Any, name: str, where: str) -> Any:
    """Returns texts that are both tokens and numbers as integers, of which each has one text."""
    try:
        numbers = cells.cast(pa.int64())
        is_same = pc.all(pc.equal(numbers.cast(pa.large_string()), cells)).as_py() in (True, None)
    except pa.ArrowInvalid:
        is_same = False
    if not is_same:
        raise InvalidArgument(
            f"{where}: column {name!r} is read as a number and as a text, so that it must hold plain integers; use a "
            "file with types for others"
        )
    return numbers
