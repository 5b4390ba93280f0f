"""JSON lines: an object a line; a part is a run of whole lines. The types of a file are those of its first lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json as pa_json
from pyarrow import types

from ....proto.errors import InvalidArgument
from ..bad_line import BadLine, BadLinePolicy, shown
from ..line_windows import LinePosition, LineWindow, check_text, is_compressed, read_runs
from ..source import PlannedFile
from .lines import TextRuns, plan_runs
from .roles import ColumnRoles
from .row_filter import Selection
from .tables import NumberedRows, own_names, with_partition

_FIRST_BYTES = 1 << 20
_Numbered = tuple[Any, npt.NDArray[np.int64]]


class JsonLinesFile:
    """A file of JSON lines.

    Args:
        path: the path or URL of the file.
        coded: the columns whose integers are ids.
    """

    has_blanks = True

    def __init__(self, path: str, coded: Sequence[str]) -> None:
        self._path = path
        self.is_sequential = is_compressed(path)
        self._runs = TextRuns()
        found = _first_schema(path, coded)
        self.schema = pa.schema([field.with_type(_type_of(field.type, field.name in coded)) for field in found])

    def parts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the lines of each run; a place is (byte offset, bytes, number of the first line, lines)."""
        planned = plan_runs(self._path, LinePosition())
        return planned.rows, np.concatenate([planned.places, planned.rows[:, None]], axis=1)

    def selected(
        self,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        selection: Selection,
    ) -> npt.NDArray[np.int64]:
        """Returns how many lines of each run pass, or cannot be parsed."""
        counts = np.zeros_like(rows)
        names = own_names(self.schema, selection.names)
        for part, place in enumerate(places):
            policy = BadLinePolicy("skip")
            found = self.read(place, names, policy)
            table = with_partition(found.table, selection.partition)
            counts[part] = table.filter(selection.expression).num_rows + policy.count
        return counts

    def read(self, place: npt.NDArray[np.int64], names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows:
        """Returns the objects of a run of lines."""
        planned = PlannedFile(self._path, place[3:], place[None, :3], is_sequential=self.is_sequential)
        return self._objects(self._runs.read(planned, 0), names, policy)

    def first(self, names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows | None:
        """Returns the objects of the first lines."""
        run = next(read_runs(self._path, run_bytes=_FIRST_BYTES), None)
        return None if run is None else self._objects(run, names, policy)

    def _objects(self, window: LineWindow, names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows:
        schema = pa.schema([self.schema.field(name) for name in names])
        found = list(_parsed(window, schema, policy))
        if not found:
            return NumberedRows(schema.empty_table(), np.empty(0, np.int64))
        return NumberedRows(
            pa.concat_tables([table for table, _ in found]), np.concatenate([rows for _, rows in found])
        )


class JsonLinesFormat:
    """The format of JSON lines."""

    name = "JSON lines"

    def open(self, path: str, roles: ColumnRoles) -> JsonLinesFile:
        """Opens a file."""
        return JsonLinesFile(path, roles.coded)


def _type_of(kind: Any, is_key: bool) -> Any:
    """Returns the type with which a column, or an element of its lists, is parsed, where its first lines have ``kind``.

    Args:
        kind: the type that Arrow infers.
        is_key: whether integers are ids; of other integers later lines may have fractions.
    """
    if types.is_list(kind):
        return pa.list_(_type_of(kind.value_type, is_key))
    if types.is_timestamp(kind):
        return pa.string()  # as it is written; Arrow takes texts that look like times for times
    if types.is_null(kind):
        return pa.string() if is_key else pa.float64()
    return pa.float64() if types.is_integer(kind) and not is_key else kind


def _first_schema(path: str, keys: Sequence[str]) -> Any:
    """Returns the names and types of the objects in the first lines of a file.

    Args:
        path: the path or URL of the file.
        keys: the columns whose integers are ids.
    """
    run = next(read_runs(path, run_bytes=_FIRST_BYTES), None)
    if run is None:
        raise InvalidArgument(f"{path}: the file is empty; expected a JSON object on each line")
    policy = BadLinePolicy("skip")
    schema, read = None, []
    for table, numbers in _parsed(run, None, policy):
        read.append(numbers)
        with suppress(pa.ArrowException):  # lines of another type are malformed
            found = [table.schema] if schema is None else [schema, table.schema]
            schema = pa.unify_schemas(found, promote_options="permissive")
    if schema is None:
        check_text(path, run.text)
        told = f": {policy.first}" if policy.first is not None else ""
        raise InvalidArgument(f"{path}: no JSON object is on its first lines{told}")
    lines = run.text.split(b"\n")
    text = b"\n".join(lines[number - run.place.line] for number in np.sort(np.concatenate(read)))
    return pa.schema([_exact(field, text) if field.name in keys else field for field in schema])


def _exact(field: Any, text: bytes) -> Any:
    """Returns the field of ids as it is, or of uint64 where all of its numbers are such ids.

    Arrow takes numbers that int64 does not hold for floats, which do not hold them exactly.
    """
    is_list = types.is_list(field.type)
    if not types.is_floating(field.type.value_type if is_list else field.type):
        return field
    exact = field.with_type(pa.list_(pa.uint64()) if is_list else pa.uint64())
    try:
        _table(text, pa.schema([exact]))
    except pa.ArrowException:
        return field
    return exact


def _parsed(window: LineWindow, schema: Any, policy: BadLinePolicy) -> Iterator[_Numbered]:
    """Yields the objects of lines as tables, with the number of each line.

    Lines that Arrow refuses, and blank ones, are found by halving what it was given.

    Raises:
        BadLine: a line is no object of the schema, and the policy is ``error``.
    """
    with suppress(pa.ArrowException):
        whole = _table(window.text, schema)
        if whole.num_rows == window.lines:
            yield whole, np.arange(window.place.line, window.place.line + window.lines)
            return
    lines = [
        (number, line)
        for number, line in enumerate(window.text.split(b"\n"), start=window.place.line)
        if not line.isspace() and line
    ]
    left = [lines] if lines else []
    while left:
        part = left.pop()
        try:
            table = _table(b"\n".join(line for _, line in part), schema)
            if table.num_rows != len(part):
                raise pa.ArrowInvalid(f"{table.num_rows} objects")
        except pa.ArrowException as error:
            if len(part) == 1:
                number, line = part[0]
                problem = str(error).removeprefix("JSON parse error: ").splitlines()[0]
                policy.meet(BadLine(window.path, number, None, f"{shown(line)} cannot be read: {problem}"))
                continue
            middle = len(part) // 2
            left.extend((part[middle:], part[:middle]))
            continue
        yield table, np.array([number for number, _ in part], dtype=np.int64)


def _table(text: bytes, schema: Any) -> Any:
    read = pa_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parse = pa_json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    return pa_json.read_json(pa.BufferReader(text), read, parse)
