"""Says which lines are no objects of given columns, line by line, as Arrow does of many lines together."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import types

_Fits: TypeAlias = "Callable[[Any], bool]"


_BETWEEN = secrets.randbits(60)  # which no line can know, so that none can be taken for two, or two for one
_NO_OBJECT = 0  # a line that is no JSON


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
        self._plain = _plain_lines(schema)
        self._decoder = json.JSONDecoder(
            object_pairs_hook=_from_pairs,
            parse_float=_parse_float,
            parse_int=_parse_int,
            parse_constant=_parse_constant,
        )

    def suspects(self, lines: list[bytes]) -> list[int]:
        """Returns which lines Arrow may refuse; of the others it refuses few, such as one that has a name twice.

        Args:
            lines: the lines, none of which has a line end.
        """
        if self._plain is None:
            return list(range(len(lines)))
        left = self._plain.sub(b"", b"\n".join(lines)).split(b"\n")  # one call for all: a plain line becomes empty
        return [at for at, line in enumerate(left) if line]

    def surely_refused(self, lines: list[bytes]) -> list[int]:
        """Returns which of some lines :meth:`is_refused` is True of, as far as a quick look shows; of the others it
        may be.

        Args:
            lines: the lines, which each begin with ``{``.
        """
        refused = [at for at, line in enumerate(lines) if not line.rstrip().endswith(b"}")]
        known = set(refused)
        # Left to is_refused: NaN, Inf, half of a pair, and a zero that unsigned columns refuse.
        asked = [
            at
            for at, line in enumerate(lines)
            if at not in known and not (b"N" in line or b"I" in line or b"\\u" in line or b"-0" in line)
        ]
        found = _objects_of([lines[at] for at in asked])
        refused += [at for at, each in zip(asked, found, strict=True) if each is not None and not self._fits(each)]
        return refused

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


def _objects_of(lines: list[bytes]) -> list[Any]:
    """Returns what each line holds; 0 for one that is no JSON, and None for one of which that is not known."""
    try:
        found = json.loads(b"[" + (b",%d," % _BETWEEN).join(lines) + b"]")
        if len(found) == max(0, 2 * len(lines) - 1) and all(each == _BETWEEN for each in found[1::2]):
            return list(found[::2])
    except (ValueError, RecursionError):
        pass
    return [_loaded(line) for line in lines]


def _loaded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return _NO_OBJECT
    except (RecursionError, ValueError):  # a text that is no UTF-8, among others
        return None


_BLANK = rb"[ \t]*+"
_TEXT = rb'"[^"\\\x00-\x1f]*+"'
_NUMBER = rb"-?+(?:0|[1-9][0-9]{0,17}+)(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]{1,2}+)?+"
_INTEGER = rb"(?:0|-?+[1-9][0-9]{0,17}+)(?![.eE])"


def _plain_lines(schema: pa.Schema) -> re.Pattern[bytes] | None:
    """Returns what finds lines that fit: flat objects of texts without escapes, and of numbers; None for other columns.

    It never gives up what it has matched, so that a line takes time in proportion to its length.
    """
    members = []
    for field in schema:
        value = _plain_value(field.type)
        if value is None:
            return None
        members.append(rb"%s%s:%s(?:%s|null)" % (_quoted(field.name), _BLANK, _BLANK, value))
    names = rb"|".join(_quoted(field.name) for field in schema)
    others = rb"(?!%s)%s%s:%s(?:%s|%s|true|false|null)" % (names, _TEXT, _BLANK, _BLANK, _TEXT, _NUMBER)
    member = rb"(?>%s)%s" % (rb"|".join([*members, others if members else others.replace(b"(?!)", b"")]), _BLANK)
    return re.compile(
        rb"^%s\{%s(?:%s(?:,%s%s)*+)?+\}[ \t\r]*+$" % (_BLANK, _BLANK, member, _BLANK, member), re.MULTILINE
    )


def _quoted(name: str) -> bytes:
    return re.escape(b'"' + name.encode() + b'"')


def _plain_value(kind: pa.DataType) -> bytes | None:
    if types.is_list(kind):
        item = _plain_value(kind.value_type)
        if item is None or types.is_list(kind.value_type):
            return None
        item = rb"(?:%s|null)%s" % (item, _BLANK)
        return rb"\[%s(?:%s(?:,%s%s)*+)?+\]" % (_BLANK, item, _BLANK, item)
    if types.is_string(kind):
        return _TEXT
    if types.is_integer(kind):
        return _INTEGER if types.is_signed_integer(kind) else _INTEGER.replace(b"-?+", b"")
    if types.is_floating(kind):
        return _NUMBER
    return b"true|false" if types.is_boolean(kind) else None
