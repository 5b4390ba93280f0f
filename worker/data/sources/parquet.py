"""Parquet files: a part is a row group; those that ``data.where`` excludes by their statistics are never read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from ....proto.features.cells import is_plain_text
from ..bad_line import BadLinePolicy
from ..storage import arrow_file_system, is_url
from .roles import ColumnRoles
from .row_filter import Selection, partition_expression
from .tables import NumberedRows, numbered_parts


class ParquetFile:
    """An open Parquet file.

    Args:
        path: the path or URL of the file.
        roles: the columns that will be read; texts among them are read as dictionaries.
    """

    is_sequential = has_blanks = False

    def __init__(self, path: str, roles: ColumnRoles) -> None:
        self._file_system, self._inside = arrow_file_system(path)
        source = self._file_system.open_input_file(self._inside)
        metadata = pq.read_metadata(source)
        self.schema = pq.ParquetFile(source, metadata=metadata).schema_arrow
        coded = [
            name
            for name in roles.coded
            if self.schema.names.count(name) == 1 and is_plain_text(self.schema.field(name).type)
        ]
        # Ranges of an object store that lie close together are fetched at once.
        self._file = pq.ParquetFile(source, metadata=metadata, read_dictionary=coded, pre_buffer=is_url(path))

    def parts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the rows of each row group; a place is (number of the row group, rows before it)."""
        metadata = self._file.metadata
        return numbered_parts(metadata.row_group(at).num_rows for at in range(metadata.num_row_groups))

    def selected(
        self,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],  # noqa: ARG002 - those of all row groups
        selection: Selection,
    ) -> npt.NDArray[np.int64]:
        """Returns how many rows of each row group pass; columns are read only where statistics do not tell."""
        counts = np.zeros_like(rows)
        fragment = ds.ParquetFileFormat().make_fragment(
            self._inside,
            filesystem=self._file_system,
            partition_expression=partition_expression(selection.partition),
        )
        for kept in fragment.split_by_row_group(filter=selection.expression, schema=selection.schema):
            scanner = kept.scanner(schema=selection.schema, filter=selection.expression)
            counts[kept.row_groups[0].id] = scanner.count_rows()
        return counts

    def first(self, names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows | None:
        """Returns the rows of the first row group; None when there is none."""
        return self.read(np.array([0, 0]), names, policy) if self._file.num_row_groups else None

    def read(self, place: npt.NDArray[np.int64], names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows:  # noqa: ARG002
        """Returns the rows of a row group."""
        group, before = int(place[0]), int(place[1])
        table: Any = self._file.read_row_group(group, columns=list(names))
        rows = self._file.metadata.row_group(group).num_rows
        return NumberedRows(table, np.arange(before + 1, before + 1 + rows))


class ParquetFormat:
    """The format of Parquet files."""

    name = "Parquet"

    def open(self, path: str, roles: ColumnRoles) -> ParquetFile:
        """Opens a file."""
        return ParquetFile(path, roles)
