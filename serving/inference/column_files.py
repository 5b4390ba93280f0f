"""Reads the columns of features from a file, in batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from ...proto.errors import InvalidArgument, NotFound
from ...proto.features.cells import RefusedRow
from ...proto.features.feature_set import FeatureSet

_LISTED = 20  # columns in an error text


class ColumnSource(Protocol):
    """The columns of one file.

    Attributes:
        names: of all columns.
    """

    names: Sequence[str]

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields runs of rows of some columns, of any number of rows."""
        ...


def check_exists(path: Path) -> None:
    """Raises NotFound when the input file does not exist."""
    if not path.is_file():
        raise NotFound(f"--input {path}: the file does not exist")


def read_columns(
    path: Path,
    source: ColumnSource,
    features: FeatureSet,
    batch_rows: int,
    *,
    keep: Sequence[str] = (),
    nulls: bool = False,
) -> Iterator[pa.Table]:
    """Yields the columns of features from a file, one batch of rows at a time.

    Args:
        path: the path of the file, for error texts.
        source: the columns of the file.
        features: the features; their columns are read.
        batch_rows: the number of rows of a batch at most.
        keep: other columns that are read as well.
        nulls: whether a column that the file lacks is a column of nulls, which features have defaults for.

    Raises:
        InvalidArgument: the file lacks a column.
        DataLoss: the file is damaged.
    """
    names = ", ".join(source.names[:_LISTED]) + (", ..." if len(source.names) > _LISTED else "")
    known = set(source.names)
    for name in keep:
        if name not in known:
            raise InvalidArgument(f"--keep {name}: {path} has no such column; columns: {names}")
    absent = [name for name in features.columns if name not in known]
    if absent and (not nulls or len(absent) == len(features.columns)):
        raise InvalidArgument(f"{path}: there is no column {absent[0]!r}, which the features read; columns: {names}")
    there = dict.fromkeys([*(name for name in features.columns if name not in absent), *keep])
    for run in source.batches(list(there)):
        for begin in range(0, len(run), batch_rows):
            table = run.slice(begin, batch_rows)
            for name in absent:
                table = table.append_column(name, pa.nulls(len(table)))
            yield table


def naming_rows(path: Path, predict: Callable[[pa.Table], Any]) -> Callable[[pa.Table], Any]:
    """Returns a model that names the row of the file where a feature refuses it.

    Args:
        path: the path of the file whose columns the model is called with, batch after batch.
        predict: the model.
    """
    before = 0

    def call(columns: pa.Table) -> Any:
        nonlocal before
        try:
            output = predict(columns)
        except RefusedRow as refused:
            place = f"{path}, row {before + refused.row + 1}, column {refused.column}"
            raise InvalidArgument(f"{place}: {refused.problem}") from None
        before += columns.num_rows
        return output

    return call
