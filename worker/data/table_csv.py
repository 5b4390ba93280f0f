"""The format of delimited text with any columns, by the schema of a job file (``data.csv``)."""

from __future__ import annotations

from collections.abc import Sequence

from ...proto.config.data_config import ColumnRef, CsvSchema
from ...proto.errors import InvalidArgument
from .features import BucketFeature, DenseFeature, FeatureSpec
from .formats import FileFormat
from .line_checker import split_fields
from .line_layout import LineLayout
from .line_windows import first_line


def csv_format(schema: CsvSchema, path: str) -> FileFormat:
    """Returns the format of one file. Columns are found by name when they have names, or by position from 0.

    Args:
        schema: the schema of the job file.
        path: the path of the file.

    Raises:
        NotFound, DataLoss: the file cannot be read.
        InvalidArgument: a column of the schema is not in the file, or has two roles.
    """
    names = _names(schema, path)
    where = _Finder(names, path)
    label = where("label", schema.label)
    numeric = {where("numeric", ref): kind for ref, kind in schema.numeric.items()}
    bucketed = {where("buckets", ref): buckets for ref, buckets in schema.buckets.items()}
    categorical = [where("categorical", ref) for ref in schema.categorical]
    read = sorted({*numeric, *bucketed})
    for position in [*read, *categorical]:
        if [label, *read, *categorical].count(position) > 1:
            raise InvalidArgument(
                f"data.csv: column {names[position]} has two roles; allowed: one of label, categorical, or "
                "numeric and buckets"
            )
    layout = LineLayout(
        columns=tuple(names),
        label=label,
        label_values={str(token): float(value) for token, value in schema.label_values.items()},
        numeric=tuple(read),
        categorical=tuple(categorical),
        delimiter=schema.delimiter,
        quote=schema.quote,
        comment=schema.comment,
        trim=schema.trim,
        missing=frozenset(schema.missing),
    )
    features = FeatureSpec(
        dense=tuple(
            DenseFeature(names[p], read.index(p), log=kind.startswith("log"), standardize=kind.endswith("standardize"))
            for p, kind in numeric.items()
        ),
        categorical=tuple(names[p] for p in categorical),
        buckets=tuple(BucketFeature(f"{names[p]}_bucket", read.index(p), count) for p, count in bucketed.items()),
    )
    return FileFormat(layout, schema.header, features)


def _names(schema: CsvSchema, path: str) -> list[str]:
    line = first_line(path, "" if schema.header else schema.comment)
    try:
        fields = [f.decode("utf-8", "replace").strip() for f in split_fields(line, schema.delimiter, schema.quote)]
    except ValueError as error:
        raise InvalidArgument(f"{path}, line 1: {error}") from error
    if schema.columns:
        names = list(schema.columns)
    elif schema.header:
        names = fields
    else:
        names = [f"column_{position}" for position in range(len(fields))]
    if not line.strip() and (schema.header or not schema.columns):
        raise InvalidArgument(f"{path}, line 1: empty; expected {'a header' if schema.header else 'data'}")
    if schema.header and names != fields:
        raise InvalidArgument(
            f"{path}, line 1: the header differs from data.csv.columns; expected {schema.delimiter.join(names)}"
        )
    if len(set(names)) != len(names):
        raise InvalidArgument(f"{path}, line 1: a column name stands twice; expected distinct names")
    return names


class _Finder:
    """Finds the position of a column by its name or its position; names have precedence."""

    def __init__(self, names: Sequence[str], path: str) -> None:
        self._names, self._path = names, path

    def __call__(self, role: str, ref: ColumnRef) -> int:
        if isinstance(ref, int) or (ref not in self._names and ref.isdecimal()):
            if 0 <= int(ref) < len(self._names):
                return int(ref)
            raise InvalidArgument(
                f"data.csv.{role}: no column {ref} in {self._path}; allowed: 0 to {len(self._names) - 1}"
            )
        if ref in self._names:
            return self._names.index(ref)
        raise InvalidArgument(f"data.csv.{role}: no column {ref!r} in {self._path}; allowed: {', '.join(self._names)}")
