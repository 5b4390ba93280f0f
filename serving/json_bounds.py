"""Parses JSON after checking bounds on its structure, so that hostile input costs little memory."""

from __future__ import annotations

import json
import re
from typing import Any

from ..proto.errors import InvalidArgument

_MOST_DEPTH = 8
_MOST_NAMES = 1024  # the most names of members, over all objects
_MOST_CONTAINERS = 2048  # the most lists and objects
_MOST_ESCAPES = 4096
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


def parse_json(data: bytes) -> Any:
    """Parses JSON and returns its value.

    Raises:
        InvalidArgument: the data is not JSON, an object has a name twice, or its structure exceeds a bound; the text
            names the bound.
    """
    _check(data.count(b"\\"), _MOST_ESCAPES, "escapes in strings")
    _check(data.count(b'"'), 4 * _MOST_NAMES, "quotation marks")
    bare = _STRING.sub(b"", data)
    _check(bare.count(b":"), _MOST_NAMES, "names")
    _check(bare.count(b"[") + bare.count(b"{"), _MOST_CONTAINERS, "lists and objects")
    depth = 0
    for bracket in _BRACKET.finditer(bare):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > _MOST_DEPTH:
            raise InvalidArgument(f"the body: it is nested deeper than {_MOST_DEPTH} levels; allowed: {_MOST_DEPTH}")
        if depth < 0:
            break
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except ValueError as error:
        raise InvalidArgument(f"the body is no JSON: {error}") from None


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise InvalidArgument(f"the body: it has {count} {what}; allowed: at most {most}")


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of its members; json alone would keep the last one of a name, and drop the others."""
    made = dict(members)
    if len(made) < len(members):
        names = [name for name, _ in members]
        twice = next(name for name in made if names.count(name) > 1)
        raise InvalidArgument(f"the body: {twice!r} is named twice; put its keys together")
    return made
