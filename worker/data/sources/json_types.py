"""Finds the types of columns of JSON lines by their first lines.

Arrow is given every type: where it infers them it recurses as deep as a line is nested, and it makes a column of each
name that a line brings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from ....proto.errors import InvalidArgument
from ..bad_line import BadLine, shown
from ..line_windows import check_text, read_runs

FIRST_BYTES = 1 << 20
_MOST_LEVELS, _MOST_FIELDS = 8, 64  # of a column that is read


class FirstObjects:
    """The objects of the first lines of a file; lines that are none are left out.

    Args:
        path: the path or URL of the file.
        kept: the columns whose values are kept.

    Attributes:
        names: of all columns, in the order in which they occur first.

    Raises:
        InvalidArgument: no line is an object.
        NotFound, DataLoss: the file cannot be read.
    """

    def __init__(self, path: str, kept: Sequence[str] = ()) -> None:
        run = next(read_runs(path, run_bytes=FIRST_BYTES), None)
        if run is None:
            raise InvalidArgument(f"{path}: the file is empty; expected a JSON object on each line")
        self._path, self._values = path, {name: list[Any]() for name in kept}
        names: dict[str, None] = {}
        objects, problem = 0, ""
        for number, line in enumerate(run.text.split(b"\n"), start=run.place.line):
            if not line or line.isspace():
                continue
            found = _object_of(line)
            if isinstance(found, str):
                problem = problem or f": {BadLine(path, number, None, f'{shown(line)} cannot be read: {found}')}"
                continue
            objects += 1
            names.update(dict.fromkeys(found))
            for name, values in self._values.items():
                if name in found:
                    values.append(found[name])
        if not objects:
            check_text(path, run.text)
            raise InvalidArgument(f"{path}: no JSON object is on its first lines{problem}")
        # Half of a surrogate pair is a name in JSON, and none in Arrow.
        self.names = tuple(name.encode(errors="backslashreplace").decode() for name in names)

    def schema(self, coded: Sequence[str]) -> Any:
        """Returns the columns, with the types of those whose values are kept; the others have the type null.

        Args:
            coded: the columns whose integers are ids; of other integers later lines may have fractions.

        Raises:
            InvalidArgument: a column that is kept is nested too deep, or its objects have too many fields.
        """
        return pa.schema([(name, self._type_of(name, name in coded)) for name in self.names])

    def _type_of(self, name: str, is_key: bool) -> Any:
        values = self._values.get(name)
        return pa.null() if values is None else _Column(f"{self._path}: column {name}", is_key).type_of(values)


def _object_of(line: bytes) -> dict[str, Any] | str:
    """Returns the object of a line, or why it is none."""
    try:
        found = json.loads(line.decode("utf-8", "replace"))
    except RecursionError:
        return "it is nested too deep"
    except ValueError as error:
        return str(error)
    return found if isinstance(found, dict) else "it is no object"


class _Column:
    """Finds the type of a column. A value of another kind than the first one has no say: its line is malformed.

    Args:
        where: the file and the column, which begin error texts.
        is_key: whether integers are ids.
    """

    def __init__(self, where: str, is_key: bool) -> None:
        self._where, self._is_key = where, is_key
        self._fields = 0

    def type_of(self, values: Sequence[Any], levels: int = _MOST_LEVELS) -> Any:
        """Returns the type of values that json made: texts stay as they are written, though they look like times."""
        if not levels:
            raise InvalidArgument(f"{self._where} is nested too deep; allowed: {_MOST_LEVELS} levels")
        kind = next((type(value) for value in values if value is not None), None)
        if kind is None:
            return pa.string() if self._is_key else pa.float64()
        if kind is list:
            lists = (value for value in values if type(value) is list)
            return pa.list_(self.type_of(list(chain.from_iterable(lists)), levels - 1))
        if kind is dict:
            return self._struct_of([value for value in values if type(value) is dict], levels)
        if kind is str or kind is bool:
            return pa.string() if kind is str else pa.bool_()
        numbers = [value for value in values if type(value) is int or type(value) is float]
        return _ids_of(numbers) if self._is_key else pa.float64()

    def _struct_of(self, objects: Sequence[dict[str, Any]], levels: int) -> Any:
        fields: dict[str, list[Any]] = {}
        for each in objects:
            for name, value in each.items():
                fields.setdefault(name.encode(errors="backslashreplace").decode(), []).append(value)
        self._fields += len(fields)
        if self._fields > _MOST_FIELDS:
            raise InvalidArgument(
                f"{self._where} has objects of {self._fields} fields; allowed: at most {_MOST_FIELDS}"
            )
        return pa.struct([(name, self.type_of(found, levels - 1)) for name, found in fields.items()])


def _ids_of(numbers: Sequence[int | float]) -> Any:
    """Returns the type of ids: uint64 where int64 does not hold one of them, and floats where they are none."""
    if float in set(map(type, numbers)):
        return pa.float64()
    least, most = min(numbers), max(numbers)
    if least >= -(1 << 63) and most < 1 << 63:
        return pa.int64()
    return pa.uint64() if least >= 0 and most < 1 << 64 else pa.float64()
