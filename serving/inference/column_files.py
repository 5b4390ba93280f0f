"""Reads the columns of features from a file, in batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.dataset as pa_dataset

from ...proto.errors import DataLoss, InvalidArgument, NotFound
from ...proto.features.cells import RefusedRow
from ...proto.features.feature_set import FeatureSet

_FORMATS = {".parquet": "parquet", ".orc": "orc", ".arrow": "feather", ".feather": "feather"}


class ColumnSource(Protocol):
    """The columns of one file.

    Attributes:
        names: of all columns.
    """

    names: Sequence[str]

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields runs of rows of some columns, of any number of rows."""
        ...


class TypedColumns:
    """The columns of a file whose format has types: .parquet, .orc, .arrow or .feather.

    Args:
        path: the path of the file.

    Attributes:
        names: of all columns.

    Raises:
        DataLoss: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _told(path):
            self._source = pa_dataset.dataset(path, format=_FORMATS[path.suffix])
        self.names: Sequence[str] = self._source.schema.names

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields runs of rows of some columns."""
        with _told(self._path):
            for batch in self._source.to_batches(columns=list(columns)):
                yield pa.Table.from_batches([batch])


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Has errors of Arrow name the file."""
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        raise DataLoss(f"{path}: {' '.join(str(error).split())}") from None


def is_with_types(path: Path) -> bool:
    """Returns whether a file has a format with types, by the end of its name."""
    return path.suffix in _FORMATS


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
    names = ", ".join(source.names)
    for name in keep:
        if name not in source.names:
            raise InvalidArgument(f"--keep {name}: {path} has no such column; columns: {names}")
    absent = [name for name in features.columns if name not in source.names]
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
