"""Decodes lines one by one and describes the fault of a bad line; it is the slow path of ``line_decoder``."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass

import numpy as np

from .bad_line import BadLine, BadLinePolicy, shown
from .line_layout import LineLayout
from .line_windows import LineWindow

HEX_TOKEN = re.compile(rb"[0-9a-fA-F]{1,8}")
_NUMBER = re.compile(rb" *[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)? *")
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Row:
    """One good line.

    Attributes:
        numeric: the numbers; NaN when missing.
        tokens: the tokens of the categorical fields; b"" when missing.
        label: 0.0 or 1.0.
    """

    numeric: tuple[float, ...]
    tokens: tuple[bytes, ...]
    label: float


class _Problem(Exception):  # noqa: N818 - becomes a BadLine once its place is known
    def __init__(self, column: str | None, text: str) -> None:
        super().__init__(text)
        self.column, self.text = column, text


def check_lines(layout: LineLayout, window: LineWindow, policy: BadLinePolicy) -> list[Row]:
    """Decodes the data lines of a window, and returns the good ones in order.

    Raises:
        BadLine: a line is malformed, and the policy is ``error``.
    """
    rows: list[Row] = []
    blanks = b" \r" if layout.delimiter == "\t" else b" \t\r"
    lines = window.text.split(b"\n")
    for number, raw in enumerate(lines[: window.lines], start=window.place.line):
        line = raw.removesuffix(b"\r")
        if not line.strip(blanks) or (layout.comment and line.startswith(layout.comment.encode())):
            continue
        try:
            rows.append(_row(layout, line))
        except _Problem as problem:
            policy.meet(BadLine(window.path, number, problem.column, problem.text))
    return rows


def _row(layout: LineLayout, line: bytes) -> Row:
    try:
        fields = split_fields(line, layout.delimiter, layout.quote)
    except ValueError as error:
        raise _Problem(None, str(error)) from error
    if len(fields) != len(layout.columns):
        delimiter = "tab" if layout.delimiter == "\t" else repr(layout.delimiter)
        raise _Problem(None, f"{len(fields)} columns, expected {len(layout.columns)} separated by {delimiter}")
    if layout.trim:
        fields = [field.strip(b" ") for field in fields]
    missing = {token.encode() for token in layout.missing} | {b""}
    numeric = tuple(
        float("nan") if fields[p].strip(b" ") in missing else _number(layout.columns[p], fields[p])
        for p in layout.numeric
    )
    tokens = tuple(b"" if fields[p] in missing else _token(layout, p, fields[p]) for p in layout.categorical)
    return Row(numeric, tokens, _label(layout, fields[layout.label]))


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


def _number(column: str, field: bytes) -> float:
    if _NUMBER.fullmatch(field) is None or abs(value := float(field)) > _FLOAT32_MAX:
        raise _Problem(column, f"{shown(field)} is not a number; expected a finite float32 or nothing")
    return value


def _token(layout: LineLayout, position: int, field: bytes) -> bytes:
    if layout.token == "hex" and HEX_TOKEN.fullmatch(field) is None:
        raise _Problem(
            layout.columns[position], f"{shown(field)} is not 1-8 hexadecimal digits; expected those or nothing"
        )
    return field


def _label(layout: LineLayout, field: bytes) -> float:
    value = layout.label_values.get(field.decode("utf-8", "backslashreplace"))
    if value is None:
        raise _Problem(
            layout.columns[layout.label], f"{shown(field)} is not a label; expected {layout.expected_labels}"
        )
    return value
