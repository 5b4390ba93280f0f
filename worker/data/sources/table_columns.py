"""Columns of Parquet, ORC, Arrow and JSON lines for ``sparserow predict``, read as a job's readers read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from ....proto.errors import InvalidArgument
from ....proto.features.base import CellKind
from ....proto.features.feature_set import FeatureSet
from ..bad_line import BadLinePolicy
from .table_formats import table_format
from .tables import reading

_FORMATS = {".parquet": "parquet", ".orc": "orc", ".arrow": "arrow", ".feather": "arrow", ".jsonl": "jsonl"}


def has_columns(path: Path) -> bool:
    """Returns whether a file has a format with columns, by the end of its name."""
    return path.suffix in _FORMATS


class TableColumns:
    """The columns of a file: texts of JSON are as they are written, and its integers that are keys stay integers.

    Args:
        path: the path of the file.
        features: what reads its cells.

    Attributes:
        names: of all columns.

    Raises:
        NotFound: the file does not exist.
        InvalidArgument: the first lines of JSON have no object.
        DataLoss: the file is damaged.
    """

    def __init__(self, path: Path, features: FeatureSet) -> None:
        self._path, self._format = str(path), table_format(_FORMATS[path.suffix])
        self._coded = [name for name, kinds in kinds_of(features).items() if kinds & {"text", "texts"}]
        with reading(self._path, self._format.name):
            self.names: Sequence[str] = tuple(self._format.open(self._path, (), ()).schema.names)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields runs of rows of some columns, of any number of rows.

        Raises:
            InvalidArgument: a column stands twice, or a line of JSON is malformed; the text names it.
            DataLoss: the file is damaged.
        """
        twice = next((name for name in columns if self.names.count(name) > 1), None)
        if twice is not None:
            raise InvalidArgument(f"{self._path}: a column {twice!r} stands twice; expected distinct names")
        with reading(self._path, self._format.name):
            file = self._format.open(self._path, columns, self._coded)
            for place in file.parts()[1]:
                yield file.read(place, tuple(columns), BadLinePolicy("error")).table


def kinds_of(features: FeatureSet) -> dict[str, set[CellKind]]:
    """Returns what features read of the cells of each column."""
    kinds: dict[str, set[CellKind]] = {}
    for feature in features.features:
        for name, kind in feature.cells.items():
            kinds.setdefault(name, set()).add(kind)
    return kinds
