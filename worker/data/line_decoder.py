"""Decodes lines of text into Arrow columns of texts, numbers and lists of them.

Three paths give the same result. The first gives a whole window to Arrow's CSV parser, with the types of its columns.
The second, for a window with bad lines, gives it those that have all fields, as texts, and marks cells that do not fit.
The third (``line_checker``) decodes line by line: quotes among bad lines, comments, and numbers that Arrow refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from .bad_line import BadLinePolicy
from .line_checker import CheckedLine, check_lines
from .line_layout import LineField, LineLayout
from .line_windows import LineWindow
from .split_lines import SplitLines

_LINES_PER_PIECE = 1024
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_TEXT = pa.large_binary()
_MOST_DIGITS = 8
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_HEX_DIGITS = b"0123456789abcdefABCDEF"

# A table with a column for each field of the layout, by its typed name, and the number of each row's line, (n) int64.
NumberedTable: TypeAlias = "tuple[pa.Table, npt.NDArray[np.int64]]"


class _NotAccepted(Exception):  # noqa: N818 - a signal, never shown
    """Raised when the fast path cannot decode lines."""


class LineDecoder:
    """Decodes windows of lines of one layout. It has no state between calls; threads must not share it."""

    def __init__(self, layout: LineLayout) -> None:
        self._layout = layout
        self._missing = pa.array([text.encode() for text in sorted(layout.missing)], _TEXT)
        names = [str(position) for position in range(len(layout.columns))]
        kinds: dict[int, set[str]] = {}
        for field in layout.fields:
            kinds.setdefault(field.position, set()).add(field.kind)
        types = {names[at]: pa.float64() if found == {"number"} else _TEXT for at, found in kinds.items()}
        nulls = {"", *layout.missing, *(f" {text}" for text in layout.missing)}
        self._texts = pa_csv.ConvertOptions(
            column_types=dict.fromkeys(types, _TEXT),
            include_columns=sorted(types, key=int),
            null_values=[],
            strings_can_be_null=False,
            check_utf8=False,
        )
        self._read = pa_csv.ReadOptions(column_names=names, use_threads=False)
        self._parse = pa_csv.ParseOptions(
            delimiter=layout.delimiter, quote_char=layout.quote or False, newlines_in_values=False
        )
        self._convert = pa_csv.ConvertOptions(
            column_types=types,
            include_columns=sorted(types, key=int),
            null_values=sorted(nulls),
            strings_can_be_null=False,
            check_utf8=False,
        )

    def decode(self, window: LineWindow, policy: BadLinePolicy) -> NumberedTable:
        """Decodes all data lines of a window; blank lines and comments are left out.

        Raises:
            BadLine: a line is malformed, and the policy is ``error``.
        """
        with suppress(_NotAccepted):
            return self._decode_fast(window)
        with suppress(_NotAccepted):
            return self._decode_marked(window, policy)
        parts = [self._decode_piece(piece, policy) for piece in window.pieces(_LINES_PER_PIECE)]
        return pa.concat_tables([table for table, _ in parts]), np.concatenate([numbers for _, numbers in parts])

    def _decode_piece(self, piece: LineWindow, policy: BadLinePolicy) -> NumberedTable:
        try:
            return self._decode_fast(piece)
        except _NotAccepted:
            lines = check_lines(self._layout, piece, policy)
        columns = {field.typed_name: self._checked(at, field, lines) for at, field in enumerate(self._layout.fields)}
        return pa.table(columns), np.array([line.number for line in lines], dtype=np.int64)

    def _checked(self, at: int, field: LineField, lines: Sequence[CheckedLine]) -> pa.Array:
        values = [line.values[at] for line in lines]
        if field.kind == "number":
            return pa.array(values, pa.float64())
        if field.kind == "numbers":
            return pa.array(values, pa.list_(pa.float64()))
        return self._of_texts(field, pa.array(values, _TEXT))

    def _decode_fast(self, window: LineWindow) -> NumberedTable:
        layout = self._layout
        comment = layout.comment.encode()
        if comment and (window.text.startswith(comment) or b"\n" + comment in window.text):
            raise _NotAccepted
        if not window.text or window.text.isspace():
            return pa.table({field.typed_name: self._checked(0, field, []) for field in layout.fields}), _no_numbers()
        self._read.block_size = len(window.text) + 1
        try:
            table = pa_csv.read_csv(pa.BufferReader(window.text), self._read, self._parse, self._convert)
        except pa.ArrowInvalid as error:
            raise _NotAccepted from error
        numbers = _line_numbers(window, table.num_rows)
        if layout.quote and layout.quote.encode() in window.text and len(numbers) != window.lines:
            raise _NotAccepted  # there are blank lines, or a quoted field contains a line end
        found = {name: table.column(name).combine_chunks() for name in table.column_names}
        columns = {field.typed_name: self._of_parsed(field, found[str(field.position)]) for field in layout.fields}
        return pa.table(columns), numbers

    def _decode_marked(self, window: LineWindow, policy: BadLinePolicy) -> NumberedTable:
        """Decodes the good lines of a window, some of which are bad; raises where line_checker alone can find them."""
        layout = self._layout
        special = [each.encode() for each in (layout.quote, layout.comment) if each]
        if any(each in window.text for each in special) or layout.delimiter in " \r":
            raise _NotAccepted
        if window.text.count(b"\r") != window.text.count(b"\r\n"):
            raise _NotAccepted  # Arrow takes a carriage return for the end of a line
        lines = SplitLines(window, layout.delimiter.encode(), len(layout.columns))
        self._read.block_size = len(lines.whole) + 1
        if not lines.whole:
            raise _NotAccepted
        try:
            table = pa_csv.read_csv(pa.BufferReader(lines.whole), self._read, self._parse, self._texts)
        except pa.ArrowInvalid as error:
            raise _NotAccepted from error
        if table.num_rows != len(lines.numbers):
            raise _NotAccepted
        is_bad = np.zeros(table.num_rows, dtype=np.bool_)
        columns = {}
        for field in layout.fields:
            cells = table.column(str(field.position)).combine_chunks()
            columns[field.typed_name], wrong = self._marked(field, cells)
            is_bad |= wrong
        bad = np.concatenate([lines.bad, lines.numbers[is_bad]])
        if len(bad):
            alone = BadLinePolicy("skip")
            check_lines(layout, lines.window_of(int(bad.min())), alone)
            if alone.first is None:
                raise _NotAccepted
            policy.meet(alone.first, len(bad))
        good = np.flatnonzero(~is_bad)
        return pa.table(columns).take(pa.array(good)), lines.numbers[good]

    def _marked(self, field: LineField, cells: pa.Array) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
        """Returns the column of a field, null where a cell does not fit, and which cells do not, (n) bool."""
        none = np.zeros(len(cells), dtype=np.bool_)
        if field.kind == "number":
            return self._marked_numbers(cells)
        if field.kind == "text" and self._layout.token == "hex" and not _are_hex(cells):
            missing = self._without_missing(self._trimmed(cells))
            is_hex = pc.match_substring_regex(missing.view(pa.large_string()), "^[0-9a-fA-F]{1,8}$")
            wrong = pc.invert(pc.fill_null(is_hex, fill_value=True)).to_numpy(zero_copy_only=False)
            return self._of_texts(field, cells), wrong
        if field.kind != "numbers":
            return self._of_texts(field, cells), none
        texts = self._without_missing(self._trimmed(cells))
        parts = pc.split_pattern(texts, self._layout.list_delimiter)
        made, wrong_items = self._marked_numbers(self._trimmed(parts.values))
        offsets = parts.offsets.to_numpy()
        owners = np.repeat(np.arange(len(cells)), np.diff(offsets))
        none[owners[wrong_items[offsets[0] : offsets[-1]]]] = True
        return pa.ListArray.from_arrays(parts.offsets, made, mask=parts.is_null()), none

    def _marked_numbers(self, cells: pa.Array) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
        """Returns numbers, null where a cell is none or missing, and which cells are none, (n) bool."""
        with suppress(_NotAccepted):
            return _checked_numbers(self._parsed_numbers(cells)), np.zeros(len(cells), dtype=np.bool_)
        texts = self._without_missing(pc.ascii_trim(cells.view(pa.large_string()), characters=" ").view(_TEXT))
        texts = texts.view(pa.large_string())
        is_number = pc.fill_null(pc.match_substring_regex(texts, _NUMBER), fill_value=True)
        numbers = pc.if_else(is_number, texts, pa.scalar(None, pa.large_string()))
        unsigned = pc.if_else(pc.starts_with(numbers, "+"), pc.utf8_slice_codeunits(numbers, 1), numbers)
        try:
            made = pc.cast(unsigned, pa.float64())
        except pa.ArrowInvalid as error:
            raise _NotAccepted from error
        values = made.to_numpy(zero_copy_only=False)
        wrong = ~is_number.to_numpy(zero_copy_only=False) | (np.abs(values) > _FLOAT32_MAX)
        return made, wrong

    def _of_parsed(self, field: LineField, cells: pa.Array) -> pa.Array:
        """Returns the column of a field, of which Arrow parsed the cells."""
        if field.kind == "number":
            return _checked_numbers(cells if cells.type != _TEXT else self._parsed_numbers(cells))
        if field.kind == "text" and self._layout.token == "hex" and not _are_hex(cells):
            raise _NotAccepted
        return self._of_texts(field, cells)

    def _of_texts(self, field: LineField, cells: pa.Array) -> pa.Array:
        """Returns the column of a field that is a text or has texts, from its cells, (n) large binary."""
        cells = self._trimmed(cells)
        if field.kind == "label":
            return cells
        cells = self._without_missing(cells)
        if field.kind == "text":
            return cells
        parts = pc.split_pattern(cells, self._layout.list_delimiter)
        items = self._trimmed(parts.values)
        if field.kind == "numbers":
            made = _checked_numbers(self._parsed_numbers(items))
        else:
            made = self._without_missing(items)
        return pa.ListArray.from_arrays(parts.offsets, made, mask=parts.is_null())

    def _trimmed(self, cells: pa.Array) -> pa.Array:
        if not self._layout.trim:
            return cells
        return pc.ascii_trim(cells.view(pa.large_string()), characters=" ").view(_TEXT)

    def _without_missing(self, cells: pa.Array) -> pa.Array:
        """Returns texts with null in place of those that mean a missing value."""
        is_missing = pc.equal(pc.binary_length(cells), 0)
        if len(self._missing):
            is_missing = pc.or_(is_missing, pc.is_in(cells, value_set=self._missing))
        return pc.if_else(is_missing, pa.scalar(None, _TEXT), cells) if pc.any(is_missing).as_py() else cells

    def _parsed_numbers(self, cells: pa.Array) -> pa.Array:
        texts = pc.ascii_trim(cells.view(pa.large_string()), characters=" ").view(_TEXT)
        try:
            return pc.cast(self._without_missing(texts).view(pa.large_string()), pa.float64())
        except pa.ArrowInvalid as error:
            raise _NotAccepted from error


def _checked_numbers(numbers: pa.Array) -> pa.Array:
    values = numbers.to_numpy(zero_copy_only=False)
    present = values if numbers.null_count == 0 else values[numbers.is_valid().to_numpy(zero_copy_only=False)]
    if not (np.abs(present) <= _FLOAT32_MAX).all():
        raise _NotAccepted
    return numbers


def _are_hex(cells: pa.Array) -> bool:
    """Returns whether each text has at most 8 hexadecimal digits, and nothing else."""
    _, offsets, data = cells.buffers()
    places = np.frombuffer(offsets, np.int64, count=len(cells) + 1, offset=cells.offset * 8)
    if np.diff(places).max(initial=0) > _MOST_DIGITS:
        return False
    text = b"" if data is None else memoryview(data)[places[0] : places[-1]].tobytes()
    return not text.translate(None, _HEX_DIGITS)


def _no_numbers() -> npt.NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


def _line_numbers(window: LineWindow, rows: int) -> npt.NDArray[np.int64]:
    """Returns the number of the line of each row, (rows) int64; Arrow leaves out empty lines."""
    first = window.place.line
    if rows == window.lines:
        return np.arange(first, first + rows)
    lines = window.text.split(b"\n")[: window.lines]
    numbers = np.array([at for at, line in enumerate(lines, start=first) if line not in (b"", b"\r")], dtype=np.int64)
    if len(numbers) != rows:
        raise _NotAccepted
    return numbers
