"""Says which lines are no objects of given columns, line by line, as Arrow does of many lines together."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import types

_Fits: TypeAlias = "Callable[[Any], bool]"


class _Malformed(Exception):  # noqa: N818 - a signal, never shown
    """Raised for JSON that Arrow refuses, and Python's parser does not."""


class _Repeated(dict[str, Any]):
    """An object that has a name twice.

    Attributes:
        names: the names that it has twice or more often.
    """

    names: frozenset[str]


class ObjectChecker:
    """Checks lines against the columns that are read. It calls Arrow for no line, as a call takes 100 us.

    Args:
        schema: the columns, of the types that ``json_types`` makes; other names may have any values.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._fits = _object_of({field.name: _of(field.type) for field in schema})
        self._decoder = json.JSONDecoder(
            object_pairs_hook=_from_pairs,
            parse_float=_parse_float,
            parse_int=_parse_int,
            parse_constant=_parse_constant,
        )

    def is_refused(self, line: bytes) -> bool:
        """Returns whether Arrow certainly refuses a line.

        Args:
            line: the line, which begins with ``{``.
        """
        if b"NaN" in line or b"Inf" in line:  # Arrow has more forms of them
            line = line.replace(b"-NaN", b"NaN").replace(b"Infinity", b"Inf").replace(b"Inf", b"Infinity")
        try:
            found = self._decoder.decode(line.decode("utf-8", "replace"))
            return not self._fits(found) or (b"\\u" in line and _has_half(found))
        except (_Malformed, json.JSONDecodeError):
            return True
        except (RecursionError, ValueError):  # nested deeply, or a number of thousands of digits
            return False


def _from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeated = _Repeated(found)
    repeated.names = frozenset(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    return repeated


_BEYOND = 309  # decimal digits of a number that Arrow surely refuses; it takes some that become infinite


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number) and Decimal(text).adjusted() >= _BEYOND:
        raise _Malformed
    return number


def _parse_int(text: str) -> int | float:
    return -0.5 if text == "-0" else int(text)  # unsigned columns refuse -0


def _parse_constant(_: str) -> float:
    return math.nan


def _has_half(value: Any) -> bool:
    """Returns whether a text or name of a value has half of a surrogate pair."""
    if isinstance(value, str):
        return any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, dict):
        return any(_has_half(name) or _has_half(item) for name, item in value.items())
    return isinstance(value, list) and any(map(_has_half, value))


def _of(kind: pa.DataType) -> _Fits:
    """Returns whether a value that is not null fits a type."""
    if types.is_list(kind):
        return _list_of(_of(kind.value_type))
    if types.is_struct(kind):
        return _object_of({field.name: _of(field.type) for field in kind})
    if types.is_integer(kind):
        signed = types.is_signed_integer(kind)
        least, most = (-(1 << 63), (1 << 63) - 1) if signed else (0, (1 << 64) - 1)
        return lambda value: (type(value) is int and least <= value <= most) or (signed and value == -0.5)
    if types.is_floating(kind):
        return lambda value: type(value) is float or type(value) is int
    expected = bool if types.is_boolean(kind) else str
    return lambda value: type(value) is expected


def _list_of(fits: _Fits) -> _Fits:
    return lambda value: type(value) is list and all(each is None or fits(each) for each in value)


def _object_of(fields: dict[str, _Fits]) -> _Fits:
    checks = list(fields.items())

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or (isinstance(value, _Repeated) and not value.names.isdisjoint(fields)):
            return False
        for name, check in checks:
            found = value.get(name)
            if found is not None and not check(found):
                return False
        return True

    return fits
