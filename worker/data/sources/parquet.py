"""Parquet files: a part is a row group; those that ``data.where`` excludes by their statistics are never read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from ....proto.features.cells import is_plain_text
from ..bad_line import BadLinePolicy
from ..storage import arrow_file_system, is_url
from .part_bounds import check_size, checked
from .row_filter import Selection, partition_expression
from .tables import NumberedRows, numbered_parts

_LEAST_BYTES = 4  # of a value, or of its index in a dictionary


class ParquetFile:
    """An open Parquet file.

    Args:
        path: the path or URL of the file.
        coded: columns whose texts are read as dictionaries.
    """

    is_sequential = has_blanks = False

    def __init__(self, path: str, coded: Sequence[str]) -> None:
        self._file_system, self._inside = arrow_file_system(path)
        source = self._file_system.open_input_file(self._inside)
        metadata = pq.read_metadata(source)
        self.schema = pq.ParquetFile(source, metadata=metadata).schema_arrow
        self._path, self._stored = path, source.size()
        coded = [
            name for name in coded if self.schema.names.count(name) == 1 and is_plain_text(self.schema.field(name).type)
        ]
        # Ranges of an object store that lie close together are fetched at once.
        self._file = pq.ParquetFile(source, metadata=metadata, read_dictionary=coded, pre_buffer=is_url(path))

    def parts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the rows of each row group; a place is (number of the row group, rows before it)."""
        return numbered_parts(self._checked_rows(at, ()) for at in range(self._file.num_row_groups))

    def selected(
        self,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],  # noqa: ARG002 - those of all row groups
        selection: Selection,
    ) -> npt.NDArray[np.int64]:
        """Returns how many rows of each row group pass; columns are read only where statistics do not suffice."""
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
        rows = self._checked_rows(group, names)
        table: Any = self._file.read_row_group(group, columns=list(names))
        return NumberedRows(checked(self._path, table), np.arange(before + 1, before + 1 + rows))

    def _checked_rows(self, at: int, names: tuple[str, ...]) -> int:
        """Returns the rows of a row group, after checking what its metadata say of some columns."""
        group = self._file.metadata.row_group(at)
        found = [group.column(number) for number in range(group.num_columns)]
        read = [column for column in found if column.path_in_schema.partition(".")[0] in names]
        stored = min(sum(column.total_compressed_size for column in read), self._stored)
        inflated = sum(max(column.total_uncompressed_size, column.num_values * _LEAST_BYTES) for column in read)
        check_size(f"{self._path}: row group {at}", stored, group.num_rows, len(names), inflated)
        return int(group.num_rows)


class ParquetFormat:
    """The format of Parquet files."""

    name = "Parquet"

    def open(self, path: str, names: Sequence[str], coded: Sequence[str]) -> ParquetFile:  # noqa: ARG002 - others need them
        """Opens a file."""
        return ParquetFile(path, coded)
