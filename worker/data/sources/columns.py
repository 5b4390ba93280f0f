"""Decodes what a job reads of columns beside features: labels, weights, groups and times.

All samples are decoded together, column by column; a sample that is malformed is named afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from ....cpp_ext import _client
from ....proto.features.cells import hashed_texts, texts_of, whole
from ....proto.features.jagged import Jagged
from ....proto.features.times import COUNT_FORM, TIME_FORM, microseconds
from ....proto.row_keys import hash_key
from ..bad_line import BadLine, BadLinePolicy, shown
from ..decoded import Lines
from ..line_layout import FieldKind, typed_name
from ..source import DecodedPart
from .roles import ColumnRoles, LabelRole

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_MOST_INTEGER = float(1 << 24)
_EMPTY_KEY = hash_key("")
Inputs: TypeAlias = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], tuple[Jagged, ...]]


@dataclass(frozen=True)
class RefusedRows:
    """The rows of a table that features refuse.

    Attributes:
        rows: which they are, (n) bool; at least one.
        column: the name of the column of which the first of them has a bad cell.
        problem: what is wrong with that cell, as a sentence about it.
    """

    rows: npt.NDArray[np.bool_]
    column: str
    problem: str


class ColumnDecoder(ABC):
    """Decodes tables of one job into samples. It has no state between calls.

    Args:
        roles: the roles of the columns.
        on_bad_line: "error" raises at a malformed row; "skip" leaves it out and counts it.
        is_text: whether tables are decoded lines of text, whose columns have typed names (``line_layout.py``).

    Attributes:
        roles: the argument of that name.
    """

    def __init__(self, roles: ColumnRoles, on_bad_line: Literal["error", "skip"], *, is_text: bool = False) -> None:
        self.roles = roles
        self._on_bad_line, self._is_text = on_bad_line, is_text
        self._unit: Literal["line", "row"] = "line" if is_text else "row"

    def column(self, table: Any, name: str, kind: FieldKind) -> Any:
        """Returns a column of a table as it has one use."""
        return table.column(typed_name(kind, name) if self._is_text else name)

    def decode(self, table: Any, path: str, numbers: npt.NDArray[np.int64]) -> DecodedPart:
        """Decodes the rows of a table.

        Args:
            table: the rows, with the columns of the roles.
            path: the path of their file.
            numbers: the number of each row in its file, from 1, (n) int64, for error texts.

        Raises:
            BadLine: a row is malformed, and such rows are not skipped.
        """
        roles = self.roles
        (numeric, keys, lists), refused = self.inputs(table, path)
        faults: list[BadLine] = []
        if refused is not None:
            row = int(np.argmax(refused.rows))
            faults.append(BadLine(path, int(numbers[row]), refused.column, refused.problem, self._unit))
            table, numbers = table.filter(pa.array(~refused.rows)), numbers[~refused.rows]
        found = [_labels(self.column(table, label.column, label.kind), label) for label in roles.labels]
        labels = np.stack(found, axis=1)
        is_good = ~np.isnan(labels).any(axis=1)
        weights = groups = times = None
        if roles.weight is not None:
            weights = _numbers(self.column(table, roles.weight, "number")).astype(np.float32)
            is_good &= (weights >= 0) & (weights < np.inf)
        if roles.group is not None:
            groups = _keys(self.column(table, roles.group, "text"))
        if roles.timestamp is not None:
            times, has_none = microseconds(whole(self.column(table, roles.timestamp, "text")), roles.timestamp_unit)
            is_good &= ~has_none
        labels = labels if len(roles.spec.labels) else labels[:, 0]
        lines = Lines(numeric, keys, labels, lists, weights, groups, times)
        bad = np.flatnonzero(~is_good)
        if len(bad):
            at = int(bad[0])
            faults.append(self._fault(table.slice(at, 1), lines.take(bad[:1]), path, int(numbers[at])))
            lines = lines.take(np.flatnonzero(is_good))
        if not faults:
            return DecodedPart(lines)
        policy = BadLinePolicy(self._on_bad_line)
        count = len(bad) + (0 if refused is None else int(refused.rows.sum()))
        policy.meet(min(faults, key=lambda fault: fault.line), count)
        return DecodedPart(lines, policy.count, policy.first)

    @abstractmethod
    def inputs(self, table: Any, path: str) -> tuple[Inputs, RefusedRows | None]:
        """Returns the numbers before they are scaled, (m, numbers) float64 with NaN for missing ones, keys and lists.

        They are those of the rows that no feature refuses; the others are returned too, None where there is none.

        Args:
            table: the rows.
            path: the path of their file, for error texts.
        """

    @abstractmethod
    def none(self) -> Lines:
        """Returns no samples."""

    def without_rows(self, numbers: int, keys: int, lists: tuple[Jagged, ...]) -> Lines:
        """Returns no samples with so many numbers, keys and lists."""
        labels = len(self.roles.spec.labels)
        return Lines(
            np.empty((0, numbers)),
            np.empty((0, keys), dtype=np.int64),
            np.empty((0, labels) if labels else 0, dtype=np.float32),
            lists,
            None if self.roles.weight is None else np.empty(0, dtype=np.float32),
            None if self.roles.group is None else np.empty(0, dtype=np.int64),
            None if self.roles.timestamp is None else np.empty(0, dtype=np.int64),
        )

    def _fault(self, row: Any, lines: Lines, path: str, number: int) -> BadLine:
        roles = self.roles
        for label, value in zip(roles.labels, np.atleast_1d(lines.labels[0]), strict=True):
            if np.isnan(value):
                cell = _shown_cell(self.column(row, label.column, label.kind))
                text = f"{cell} is not a label; expected {label.expected}"
                return BadLine(path, number, label.column, text, self._unit)
        if roles.weight is not None and lines.weights is not None and not 0 <= lines.weights[0] < np.inf:
            cell = _shown_cell(self.column(row, roles.weight, "number"))
            text = f"{cell} is not a weight; expected a finite number >= 0"
            return BadLine(path, number, roles.weight, text, self._unit)
        assert roles.timestamp is not None
        cell = _shown_cell(self.column(row, roles.timestamp, "text"))
        form = TIME_FORM if roles.timestamp_unit is None else COUNT_FORM
        return BadLine(path, number, roles.timestamp, f"{cell} is not a time; expected {form}", self._unit)


def _shown_cell(column: Any) -> str:
    value = column[0].as_py()
    return "null" if value is None else shown(value if isinstance(value, bytes) else str(value).encode())


def _labels(column: Any, label: LabelRole) -> npt.NDArray[np.float32]:
    """Returns a label of rows, (n) float32; NaN where a value is none."""
    if label.values is None:
        numbers = _numbers(column)
        is_good = np.abs(numbers) <= (_MOST_INTEGER if label.is_integer else _FLOAT32_MAX)
        if label.is_integer:
            is_good &= np.floor(numbers) == numbers
        return np.where(is_good, numbers, np.nan).astype(np.float32)
    codes, texts = _coded(column)
    values = [label.values.get(text.decode("utf-8", "backslashreplace")) for text in texts]
    by_code = np.array([np.nan if value is None else value for value in values], dtype=np.float32)
    return by_code[codes]


def _numbers(column: Any) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy()
    return values


def _coded(column: Any) -> tuple[npt.NDArray[np.int64], list[bytes]]:
    """Returns the column as codes, (n) int64, and the text of each code; null has the empty text."""
    kind = column.type
    if types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif types.is_decimal(kind):
        column = column.cast(pa.float64())
    if not types.is_dictionary(column.type):
        column = column.dictionary_encode()
    merged = column.unify_dictionaries().combine_chunks()
    if isinstance(merged, pa.ChunkedArray):  # which has no chunk
        return np.empty(0, np.int64), []
    texts: list[bytes] = texts_of(merged.dictionary).to_pylist()
    return _codes(merged, len(texts)), [*texts, b""]


def _keys(column: Any) -> npt.NDArray[np.int64]:
    """Returns the keys of a column, (n) int64; a text that is in a dictionary is hashed once."""
    if types.is_boolean(column.type):
        column = column.cast(pa.int8())
    parts = []
    for chunk in column.chunks:
        if types.is_dictionary(chunk.type):
            of_text = np.append(_hashed(chunk.dictionary), _EMPTY_KEY)
            parts.append(of_text[_codes(chunk, len(chunk.dictionary))])
        else:
            parts.append(_hashed(chunk))
    return np.concatenate([np.empty(0, np.int64), *parts])


def _hashed(values: Any) -> npt.NDArray[np.int64]:
    """Returns the key of each value; null has that of the empty text."""
    return hashed_texts(texts_of(values), _client.text_keys)


def _codes(chunk: Any, null: int) -> npt.NDArray[np.int64]:
    """Returns the places in the dictionary, (n) int64; ``null`` where the value is null."""
    codes: npt.NDArray[np.int64] = pc.fill_null(chunk.indices.cast(pa.int64()), null).to_numpy(zero_copy_only=False)
    return codes
