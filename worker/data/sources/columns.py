"""Decodes columns of Arrow into numbers, keys and labels, with the ids of the CSV reader bit for bit.

A number may have any type of number; null and NaN are missing. A text or an integer becomes the key of its text; null
is the empty text. All samples are decoded together, column by column; a sample that is malformed is named afterwards.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from ....cpp_ext import _client
from ....proto.config.data_config import ColumnsSchema
from ....proto.errors import InvalidArgument
from ....proto.features.cells import hashed_texts, texts_of
from ....proto.row_keys import hash_key
from ..bad_line import BadLine, BadLinePolicy, shown
from ..features import BucketFeature, DenseFeature, FeatureSpec
from ..line_decoder import Lines
from ..source import DecodedPart

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_NEAREST, _LISTED = 3, 12
_EMPTY_KEY = hash_key("")


@dataclass(frozen=True)
class ColumnRoles:
    """What a job reads of a file with columns.

    Attributes:
        label: the name of the label's column.
        label_values: the label, 0.0 or 1.0, for each allowed text.
        numeric: the columns that are decoded as numbers.
        categorical: the columns that are decoded as keys.
        spec: the inputs that are made of them.
        others: columns that features read, which look at their types themselves.
    """

    label: str
    label_values: dict[str, float]
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    spec: FeatureSpec
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are read, each once."""
        return tuple(dict.fromkeys([self.label, *self.numeric, *self.categorical, *self.others]))


def roles_of(schema: ColumnsSchema) -> ColumnRoles:
    """Returns the roles of the columns, by ``data.columns``.

    Raises:
        InvalidArgument: a column has two roles.
    """
    numeric = tuple(dict.fromkeys([*schema.numeric, *schema.buckets]))
    names = [schema.label, *numeric, *schema.categorical]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(
                f"data.columns: column {name} has two roles; allowed: one of label, categorical, or numeric and buckets"
            )
    spec = FeatureSpec(
        dense=tuple(
            DenseFeature(
                name, numeric.index(name), log=kind.startswith("log"), standardize=kind.endswith("standardize")
            )
            for name, kind in schema.numeric.items()
        ),
        categorical=schema.categorical,
        buckets=tuple(
            BucketFeature(f"{name}_bucket", numeric.index(name), count) for name, count in schema.buckets.items()
        ),
    )
    values = {text: float(value) for text, value in schema.label_values.items()}
    return ColumnRoles(schema.label, values, numeric, schema.categorical, spec)


def check_columns(roles: ColumnRoles, filtered: Sequence[str], schema: Any, path: str) -> None:
    """Checks that a file has the columns, with types that their roles allow.

    Args:
        roles: the roles of the columns.
        filtered: the columns that ``data.where`` reads.
        schema: the names and types of the file's columns.
        path: the path of the file.

    Raises:
        InvalidArgument: a column is missing, stands twice, or has a type that its role does not allow.
    """
    wanted = [("data.columns.label", roles.label)]
    wanted += [("data.columns.numeric or buckets", name) for name in roles.numeric]
    wanted += [("data.columns.categorical", name) for name in roles.categorical]
    wanted += [("features", name) for name in roles.others]
    wanted += [("data.where", name) for name in filtered]
    for setting, name in wanted:
        found = schema.names.count(name)
        if found > 1:
            raise InvalidArgument(f"{path}: a column {name!r} stands twice; expected distinct names")
        if not found:
            near = difflib.get_close_matches(name, schema.names, n=_NEAREST, cutoff=0.5)
            listed = ", ".join(schema.names[:_LISTED]) + (", ..." if len(schema.names) > _LISTED else "")
            told = f"nearest: {', '.join(near)}" if near else f"it has {listed}"
            raise InvalidArgument(f"{setting}: no column {name!r} in {path}; {told}")
        kind = schema.field(name).type
        is_label, is_numeric = setting == "data.columns.label", setting == "data.columns.numeric or buckets"
        allowed = [_is_number] if is_numeric else [_is_number, _is_text] if is_label else [_is_text]
        if setting not in ("data.where", "features") and not any(is_allowed(kind) for is_allowed in allowed):
            expected = "a number" if is_numeric else "a text or a number" if is_label else "a text or an integer"
            raise InvalidArgument(f"{setting}: column {name} of {path} is {kind}; expected {expected}")


def _is_number(kind: Any) -> bool:
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_boolean(kind)
        or types.is_null(kind)
    )


def is_plain_text(kind: Any) -> bool:
    """Returns whether a type is text or bytes, and no dictionary of them."""
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_string_view(kind)
        or types.is_binary_view(kind)
    )


def _is_text(kind: Any) -> bool:
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return is_plain_text(kind) or bool(types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind))


class ColumnDecoder:
    """Decodes tables of one job. It has no state between calls.

    Args:
        roles: the roles of the columns.
        on_bad_line: "error" raises at a malformed row; "skip" leaves it out and counts it.
    """

    def __init__(self, roles: ColumnRoles, on_bad_line: Literal["error", "skip"]) -> None:
        self._roles, self._on_bad_line = roles, on_bad_line

    def decode(self, table: Any, path: str, numbers: npt.NDArray[np.int64]) -> DecodedPart:
        """Decodes the rows of a table.

        Args:
            table: the rows, with the columns of the roles.
            path: the path of their file.
            numbers: the number of each row in its file, from 1, (n) int64, for error texts.

        Raises:
            BadLine: a row is malformed, and such rows are not skipped.
        """
        numeric, keys = self.inputs(table, path)
        labels = self._labels(table.column(self._roles.label))
        lines = Lines(numeric, keys, labels)
        is_good = ~np.isnan(labels) & (~(np.abs(numeric) > _FLOAT32_MAX)).all(axis=1)
        if is_good.all():
            return DecodedPart(lines)
        policy = BadLinePolicy(self._on_bad_line)
        bad = np.flatnonzero(~is_good)
        policy.meet(self._fault(table.slice(int(bad[0]), 1), lines.take(bad[:1]), path, int(numbers[bad[0]])))
        return DecodedPart(lines.take(np.flatnonzero(is_good)), len(bad), policy.first)

    def inputs(self, table: Any, path: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:  # noqa: ARG002
        """Returns the numbers of rows, (n, numeric) float64 with NaN for missing ones, and keys, (n, keys) int64.

        Args:
            table: the rows.
            path: the path of their file, for error texts.
        """
        roles, rows = self._roles, table.num_rows
        numeric = np.empty((rows, len(roles.numeric)), dtype=np.float64)
        for at, name in enumerate(roles.numeric):
            numeric[:, at] = _numbers(table.column(name))
        keys = np.empty((rows, len(roles.categorical)), dtype=np.int64)
        for at, name in enumerate(roles.categorical):
            keys[:, at] = _keys(table.column(name))
        return numeric, keys

    def none(self) -> Lines:
        """Returns no samples."""
        roles = self._roles
        return Lines(
            np.empty((0, len(roles.numeric))),
            np.empty((0, len(roles.categorical)), dtype=np.int64),
            np.empty(0, dtype=np.float32),
        )

    def _labels(self, column: Any) -> npt.NDArray[np.float32]:
        """Returns the labels, (n) float32; NaN where a value is none."""
        codes, texts = _coded(column)
        values = [self._roles.label_values.get(text.decode("utf-8", "backslashreplace")) for text in texts]
        by_code = np.array([np.nan if value is None else value for value in values], dtype=np.float32)
        return by_code[codes]

    def _fault(self, row: Any, lines: Lines, path: str, number: int) -> BadLine:
        roles = self._roles
        if np.isnan(lines.labels[0]):
            value = row.column(roles.label)[0].as_py()
            told = "null" if value is None else shown(str(value).encode())
            expected = " or ".join(repr(text) for text in roles.label_values)
            return BadLine(path, number, roles.label, f"{told} is not a label; expected {expected}", unit="row")
        at = int(np.flatnonzero(np.abs(lines.numeric[0]) > _FLOAT32_MAX)[0])
        told = repr(float(lines.numeric[0, at]))
        return BadLine(
            path, number, roles.numeric[at], f"{told} is not finite as float32; expected a number or null", unit="row"
        )


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
