"""Decodes lines one by one and describes the fault of a bad line; it is the slow path of ``line_decoder``."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .bad_line import BadLine, BadLinePolicy, shown
from .line_layout import LineField, LineLayout
from .line_windows import LineWindow

HEX_TOKEN = re.compile(rb"[0-9a-fA-F]{1,8}")
_NUMBER = re.compile(rb" *[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)? *")
_FLOAT32_MAX = float(np.finfo(np.float32).max)

# A text as it is, a number, or a list of numbers; None where the value is missing.
Value: TypeAlias = "bytes | float | list[float | None] | None"


@dataclass(frozen=True)
class CheckedLine:
    """One good line.

    Attributes:
        number: the number of the line in its file, from 1.
        values: the value of each of the layout's ``fields``. A text, and a list of texts, is the field itself.
    """

    number: int
    values: tuple[Value, ...]


class _Problem(Exception):  # noqa: N818 - becomes a BadLine once its place is known
    def __init__(self, column: str | None, text: str) -> None:
        super().__init__(text)
        self.column, self.text = column, text


def check_lines(layout: LineLayout, window: LineWindow, policy: BadLinePolicy) -> list[CheckedLine]:
    """Decodes the data lines of a window, and returns the good ones in order.

    Raises:
        BadLine: a line is malformed, and the policy is ``error``.
    """
    good: list[CheckedLine] = []
    missing = {text.encode() for text in layout.missing} | {b""}
    blanks = b" \r" if layout.delimiter == "\t" else b" \t\r"
    lines = window.text.split(b"\n")
    for number, raw in enumerate(lines[: window.lines], start=window.place.line):
        line = raw.removesuffix(b"\r")
        if not line.strip(blanks) or (layout.comment and line.startswith(layout.comment.encode())):
            continue
        try:
            good.append(CheckedLine(number, _values(layout, line, missing)))
        except _Problem as problem:
            policy.meet(BadLine(window.path, number, problem.column, problem.text))
    return good


def _values(layout: LineLayout, line: bytes, missing: set[bytes]) -> tuple[Value, ...]:
    try:
        texts = split_fields(line, layout.delimiter, layout.quote)
    except ValueError as error:
        raise _Problem(None, str(error)) from error
    if len(texts) != len(layout.columns):
        delimiter = "tab" if layout.delimiter == "\t" else repr(layout.delimiter)
        raise _Problem(None, f"{len(texts)} columns, expected {len(layout.columns)} separated by {delimiter}")
    if layout.trim:
        texts = [text.strip(b" ") for text in texts]
    return tuple(_value(layout, field, texts[field.position], missing) for field in layout.fields)


def _value(layout: LineLayout, field: LineField, text: bytes, missing: set[bytes]) -> Value:
    if field.kind == "number":
        return _number(field.name, text, missing)
    if field.kind == "numbers":
        if text in missing:
            return None
        return [_number(field.name, part, missing) for part in text.split(layout.list_delimiter.encode())]
    is_token = field.kind == "text" and text not in missing
    if is_token and layout.token == "hex" and HEX_TOKEN.fullmatch(text) is None:
        raise _Problem(field.name, f"{shown(text)} is not 1-8 hexadecimal digits; expected those or nothing")
    return text


def split_fields(line: bytes, delimiter: str, quote: str) -> list[bytes]:
    """Splits a line into its fields, and removes their quotes.

    Raises:
        ValueError: the quotes do not match.
    """
    if not quote or quote.encode() not in line:
        return line.split(delimiter.encode())
    text = line.decode("latin-1")  # one character for each byte, so that any bytes pass the csv module unchanged
    try:
        fields = next(csv.reader([text], delimiter=delimiter, quotechar=quote, strict=True))
    except csv.Error as error:
        raise ValueError(f"the quotes do not match: {error}") from error
    return [field.encode("latin-1") for field in fields]


def _number(column: str, text: bytes, missing: set[bytes]) -> float | None:
    if text.strip(b" ") in missing:
        return None
    if _NUMBER.fullmatch(text) is None or abs(value := float(text)) > _FLOAT32_MAX:
        raise _Problem(column, f"{shown(text)} is not a number; expected a finite float32 or nothing")
    return value
