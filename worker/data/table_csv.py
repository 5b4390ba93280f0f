"""The format of delimited text with any columns, by the schema of a job file (``data.csv``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...proto.config.data_config import ColumnRef, CsvSchema
from ...proto.errors import InvalidArgument
from ...proto.options.csv_dialect import CsvDialect
from .formats import FileFormat, fields_of
from .line_checker import split_fields
from .line_layout import FieldKind, LineLayout
from .line_windows import first_line


def with_names(schema: CsvSchema, path: str) -> CsvSchema:
    """Returns the schema with a name for each column that it gives by position.

    Args:
        schema: the schema of the job file.
        path: the path of a file, in which the columns are found.

    Raises:
        NotFound, DataLoss: the file cannot be read.
        InvalidArgument: a column of the schema is not in the file.
    """
    find = _Finder(names_of(schema, path), path)
    labels = {
        name: label.model_copy(update={"column": find(f"labels.{name}", label.column or name)})
        for name, label in schema.labels.items()
    }
    return schema.model_copy(
        update={
            "label": None if schema.label is None else find("label", schema.label),
            "labels": labels,
            "sample_weight": None if schema.sample_weight is None else find("sample_weight", schema.sample_weight),
            "group": None if schema.group is None else find("group", schema.group),
            "timestamp": None if schema.timestamp is None else find("timestamp", schema.timestamp),
        }
    )


def csv_format(schema: CsvDialect, path: str, uses: Iterable[tuple[str, FieldKind]]) -> FileFormat:
    """Returns the format of one file.

    Args:
        schema: the schema of the job file.
        path: the path of the file.
        uses: the columns that are read, which the file has (:func:`names_of`), and what is made of each.

    Raises:
        NotFound, DataLoss: the file cannot be read.
        InvalidArgument: the file has another header than the schema.
    """
    names = names_of(schema, path)
    layout = LineLayout(
        columns=names,
        fields=fields_of(uses, names),
        delimiter=schema.delimiter,
        list_delimiter=schema.list_delimiter,
        quote=schema.quote,
        comment=schema.comment,
        trim=schema.trim,
        missing=frozenset(schema.missing),
    )
    return FileFormat(layout, schema.header)


def names_of(schema: CsvDialect, path: str) -> tuple[str, ...]:
    """Returns the names of all fields of a line, in file order.

    Raises:
        NotFound, DataLoss: the file cannot be read.
        InvalidArgument: the file has another header than the schema, a name twice, or no line where one is needed.
    """
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
    return tuple(names)


class _Finder:
    """Finds the name of a column by its name or its position; names have precedence."""

    def __init__(self, names: Sequence[str], path: str) -> None:
        self._names, self._path = names, path

    def __call__(self, role: str, ref: ColumnRef) -> str:
        if isinstance(ref, int) or (ref not in self._names and ref.isdecimal()):
            if 0 <= int(ref) < len(self._names):
                return self._names[int(ref)]
            raise InvalidArgument(
                f"data.csv.{role}: no column {ref} in {self._path}; allowed: 0 to {len(self._names) - 1}"
            )
        if ref in self._names:
            return ref
        raise InvalidArgument(f"data.csv.{role}: no column {ref!r} in {self._path}; allowed: {', '.join(self._names)}")
