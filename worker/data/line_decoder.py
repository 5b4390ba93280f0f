"""Decodes lines into columns of numbers and keys.

Two paths give the same result. The fast path gives a whole window to Arrow's CSV parser. The slow path
(``line_checker``) decodes what Arrow refuses, line by line. It names a bad line, or decodes a line for which Arrow is
too strict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ...proto.features.jagged import Jagged
from ...proto.row_keys import hash_keys
from .bad_line import BadLinePolicy
from .line_checker import HEX_TOKEN, check_lines
from .line_layout import LineLayout
from .line_windows import LineWindow

_LINES_PER_PIECE = 1024
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Lines:
    """Decoded lines, in file order.

    Attributes:
        numeric: the numbers, (n, len(layout.numeric)) float64; NaN where a value is missing.
        keys: the keys, (n, len(layout.categorical)) int64.
        labels: the labels, (n) float32; where the job names several, (n, labels).
        lists: the keys of each feature that gives lists.
        weights: the weight of each sample, (n) float32; None: the job names none.
        groups: a key of the group of each sample, (n) int64; None: the job names none.
    """

    numeric: npt.NDArray[np.float64]
    keys: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]
    lists: tuple[Jagged, ...] = ()
    weights: npt.NDArray[np.float32] | None = None
    groups: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, order: npt.NDArray[np.int64] | slice) -> Lines:
        """Returns the lines at the positions ``order``, (m) int64 or a slice, whose lines are a view."""
        return Lines(
            self.numeric[order],
            self.keys[order],
            self.labels[order],
            tuple(lists.take(order) for lists in self.lists),
            None if self.weights is None else self.weights[order],
            None if self.groups is None else self.groups[order],
        )


def concatenate(parts: Sequence[Lines]) -> Lines:
    """Joins the lines of ``parts``, which must have at least one part, in order."""
    return Lines(
        np.concatenate([part.numeric for part in parts]),
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.labels for part in parts]),
        tuple(Jagged.concatenate(lists) for lists in zip(*(part.lists for part in parts), strict=True)),
        _joined([part.weights for part in parts]),
        _joined([part.groups for part in parts]),
    )


def _joined(parts: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None


class _NotAccepted(Exception):  # noqa: N818 - a signal, never shown
    """Raised when the fast path cannot decode lines."""


class LineDecoder:
    """Decodes windows of lines of one layout. It has no state between calls; threads must not share it."""

    def __init__(self, layout: LineLayout) -> None:
        self._layout = layout
        self._missing = {token.encode() for token in layout.missing} | {b""}
        self._labels = {token.encode(): value for token, value in layout.label_values.items()}
        names = [str(position) for position in range(len(layout.columns))]
        used = {layout.label, *layout.numeric, *layout.categorical}
        token_type = pa.dictionary(pa.int32(), pa.binary())
        types = {names[p]: pa.float64() if p in layout.numeric else token_type for p in used}
        nulls = {"", *layout.missing, *(f" {token}" for token in layout.missing)}
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

    def decode(self, window: LineWindow, policy: BadLinePolicy) -> Lines:
        """Decodes all data lines of a window; blank lines and comments are left out.

        Raises:
            BadLine: a line is malformed, and the policy is ``error``.
        """
        try:
            return self._decode_fast(window)
        except _NotAccepted:
            return concatenate([self._decode_piece(piece, policy) for piece in window.pieces(_LINES_PER_PIECE)])

    def _decode_piece(self, piece: LineWindow, policy: BadLinePolicy) -> Lines:
        try:
            return self._decode_fast(piece)
        except _NotAccepted:
            rows = check_lines(self._layout, piece, policy)
        numeric = np.array([row.numeric for row in rows], dtype=np.float64)
        keys = [hash_keys(row.tokens) for row in rows]
        return Lines(
            numeric.reshape(len(rows), len(self._layout.numeric)),
            np.array(keys, dtype=np.int64).reshape(len(rows), len(self._layout.categorical)),
            np.array([row.label for row in rows], dtype=np.float32),
        )

    def _decode_fast(self, window: LineWindow) -> Lines:
        layout = self._layout
        comment = layout.comment.encode()
        if comment and (window.text.startswith(comment) or b"\n" + comment in window.text):
            raise _NotAccepted
        if not window.text.strip():
            return self._no_lines()
        self._read.block_size = len(window.text) + 1
        try:
            table = pa_csv.read_csv(pa.BufferReader(window.text), self._read, self._parse, self._convert)
        except pa.ArrowInvalid as error:
            raise _NotAccepted from error
        rows = table.num_rows
        if layout.quote.encode() in window.text and layout.quote and rows != window.lines:
            raise _NotAccepted  # there are blank lines, or a quoted field contains a line end
        numeric = np.empty((rows, len(layout.numeric)), dtype=np.float64)
        for out, position in enumerate(layout.numeric):
            numeric[:, out] = self._numbers(table.column(str(position)))
        keys = np.empty((rows, len(layout.categorical)), dtype=np.int64)
        for out, position in enumerate(layout.categorical):
            codes, tokens = self._tokens(table.column(str(position)))
            keys[:, out] = self._keys(tokens)[codes]
        codes, tokens = self._tokens(table.column(str(layout.label)))
        return Lines(numeric, keys, self._label_values(tokens)[codes])

    def _no_lines(self) -> Lines:
        layout = self._layout
        return Lines(
            np.empty((0, len(layout.numeric))),
            np.empty((0, len(layout.categorical)), dtype=np.int64),
            np.empty(0, dtype=np.float32),
        )

    def _numbers(self, column: Any) -> npt.NDArray[np.float64]:
        values: npt.NDArray[np.float64] = column.to_numpy()
        present = values if column.null_count == 0 else values[column.is_valid().to_numpy()]
        if not (np.abs(present) <= _FLOAT32_MAX).all():
            raise _NotAccepted
        return values

    def _tokens(self, column: Any) -> tuple[npt.NDArray[np.int64], list[bytes]]:
        merged = column.combine_chunks()
        tokens: list[bytes] = merged.dictionary.to_pylist()
        if self._layout.trim:
            tokens = [token.strip(b" ") for token in tokens]
        return merged.indices.to_numpy(), tokens

    def _keys(self, tokens: list[bytes]) -> npt.NDArray[np.int64]:
        tokens = [b"" if token in self._missing else token for token in tokens]
        if self._layout.token == "hex" and not all(HEX_TOKEN.fullmatch(token) for token in tokens if token):
            raise _NotAccepted
        return hash_keys(tokens)

    def _label_values(self, tokens: list[bytes]) -> npt.NDArray[np.float32]:
        try:
            return np.array([self._labels[token] for token in tokens], dtype=np.float32)
        except KeyError as error:
            raise _NotAccepted from error
