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

from ..bad_line import BadLine, BadLinePolicy, shown
from ..line_windows import LinePosition, LineWindow, is_compressed, read_runs
from ..source import PlannedFile
from .json_checker import ObjectChecker
from .json_types import FIRST_BYTES, FirstObjects
from .lines import TextRuns, plan_runs
from .row_filter import Selection
from .tables import NumberedRows, own_names, with_partition

_LINES_PER_PIECE = 1024
_Line = tuple[int, bytes]  # the number of a line, and its text
_Numbered = tuple[Any, npt.NDArray[np.int64]]


class JsonLinesFile:
    """A file of JSON lines.

    Args:
        path: the path or URL of the file.
        schema: its columns; those that will not be read have the type null.
    """

    has_blanks = True

    def __init__(self, path: str, schema: Any) -> None:
        self._path, self.schema = path, schema
        self.is_sequential = is_compressed(path)
        self._runs = TextRuns()

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
        return self.decode(self._runs.read(planned, 0), names, policy)

    def first(self, names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows | None:
        """Returns the objects of the first lines."""
        run = next(read_runs(self._path, run_bytes=FIRST_BYTES), None)
        return None if run is None else self.decode(run, names, policy)

    def decode(self, window: LineWindow, names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows:
        """Returns the objects of lines, which need not be in the file."""
        # A column that was not asked for when the file was opened is one to count rows by: its values are not read.
        schema = pa.schema([field for field in map(self.schema.field, names) if not types.is_null(field.type)])
        found = list(_parsed(window, schema, policy))
        rows = np.concatenate([np.empty(0, np.int64), *(numbers for _, numbers in found)])
        if not schema.names:
            return NumberedRows(pa.table({name: pa.nulls(len(rows)) for name in names}), rows)
        return NumberedRows(pa.concat_tables([schema.empty_table(), *(table for table, _ in found)]), rows)


class JsonLinesFormat:
    """The format of JSON lines. It looks at the first lines of each file once."""

    name = "JSON lines"

    def __init__(self) -> None:
        self._schemas: dict[tuple[str, tuple[str, ...]], Any] = {}

    def open(self, path: str, names: Sequence[str], coded: Sequence[str]) -> JsonLinesFile:
        """Opens a file."""
        found = path, tuple(names)
        if found not in self._schemas:
            self._schemas[found] = FirstObjects(path, names).schema(coded)
        return JsonLinesFile(path, self._schemas[found])


def _parsed(window: LineWindow, schema: Any, policy: BadLinePolicy) -> Iterator[_Numbered]:
    """Yields the objects of lines as tables, with the number of each line; blank lines are left out.

    Raises:
        BadLine: a line is no object of the schema, and the policy is ``error``.
    """
    begins = window.text.startswith(b"{") + window.text.count(b"\n{")
    if begins == window.lines:
        with suppress(pa.ArrowException):
            whole = _table(window.text, schema)
            if whole.num_rows == window.lines:
                yield whole, np.arange(window.place.line, window.place.line + window.lines)
                return
    lines = [
        (number, line)
        for number, line in enumerate(window.text.split(b"\n"), start=window.place.line)
        if line and not line.isspace()
    ]
    good = list(_good(lines, schema))
    yield from good
    found = np.concatenate([np.empty(0, np.int64), *(numbers for _, numbers in good)])
    if len(found) < len(lines):
        there = set(found.tolist())
        number, line = next(each for each in lines if each[0] not in there)
        policy.meet(policy.first or _fault(window.path, number, line, schema), len(lines) - len(found))


def _good(lines: Sequence[_Line], schema: Any) -> Iterator[_Numbered]:
    """Yields the objects among some lines, of which one at least is bad.

    Arrow refuses lines as a whole, so bad ones are left out before: those that are surely bad, and where Arrow refuses
    others too, piece by piece those that a slower check refuses.
    """
    # Arrow ends the process at a null that comes before every object, so that it is given objects alone.
    objects = [each for each in lines if each[1].lstrip().startswith(b"{")]
    checker = ObjectChecker(schema)
    suspects = checker.suspects([line for _, line in objects])
    refused = {suspects[at] for at in checker.surely_refused([objects[at][1] for at in suspects])}
    objects = [each for at, each in enumerate(objects) if at not in refused]
    if not objects:
        return
    with suppress(pa.ArrowException):
        yield _numbered(objects, schema)
        return
    for begin in range(0, len(objects), _LINES_PER_PIECE):
        piece = objects[begin : begin + _LINES_PER_PIECE]
        try:
            yield _numbered(piece, schema)
        except pa.ArrowException:
            yield from _halved([each for each in piece if not checker.is_refused(each[1])], schema)


def _halved(lines: Sequence[_Line], schema: Any) -> Iterator[_Numbered]:
    """Yields the objects among lines of which the checks refuse none, and Arrow perhaps some, by halving."""
    left = [lines]
    while left:
        part = left.pop()
        try:
            if part:
                yield _numbered(part, schema)
        except pa.ArrowException:
            middle = len(part) // 2
            if middle:
                left.extend((part[middle:], part[:middle]))


def _numbered(lines: Sequence[_Line], schema: Any) -> _Numbered:
    """Returns the objects of lines that each begin with one, and the number of each line.

    Raises:
        pa.ArrowException: a line is not one object of the schema.
    """
    table = _table(b"\n".join(line for _, line in lines), schema)
    if table.num_rows != len(lines):
        raise pa.ArrowInvalid(f"{table.num_rows} objects")
    return table, np.array([number for number, _ in lines], dtype=np.int64)


def _fault(path: str, number: int, line: bytes, schema: Any) -> BadLine:
    """Returns the error of a line that is bad."""
    problem = "it is no object"
    if line.lstrip().startswith(b"{"):
        try:
            _numbered([(number, line)], schema)
        except pa.ArrowException as error:
            problem = str(error).removeprefix("JSON parse error: ").splitlines()[0]
    return BadLine(path, number, None, f"{shown(line)} cannot be read: {problem}")


def _table(text: bytes, schema: Any) -> Any:
    read = pa_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parse = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    return pa_json.read_json(pa.BufferReader(text), read, parse)
