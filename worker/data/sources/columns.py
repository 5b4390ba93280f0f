"""Decodes columns of Arrow into numbers, keys and labels, with the ids of the CSV reader bit for bit.

A number may have any type of number; null and NaN are missing. A text or an integer becomes the key of its text; null
is the empty text. All samples are decoded together, column by column; a sample that is malformed is named afterwards.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from ....cpp_ext import _client
from ....proto.config.data_config import ColumnsSchema
from ....proto.errors import InvalidArgument
from ....proto.features.cells import hashed_texts, texts_of
from ....proto.features.jagged import Jagged
from ....proto.row_keys import hash_key
from ..bad_line import BadLine, BadLinePolicy, shown
from ..features import BucketFeature, DenseFeature, FeatureSpec
from ..line_decoder import Lines
from ..source import DecodedPart

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_MOST_INTEGER = float(1 << 24)
_NEAREST, _LISTED = 3, 12
_EMPTY_KEY = hash_key("")
Inputs: TypeAlias = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], tuple[Jagged, ...]]


@dataclass(frozen=True)
class LabelRole:
    """A label and its column.

    Attributes:
        setting: the key of the job file that names the column.
        column: the name of the column.
        values: the number of each allowed text; None: the column has numbers.
        is_integer: whether the numbers must be integers, of at most 24 bits, which float32 holds exactly.
    """

    setting: str
    column: str
    values: dict[str, float] | None
    is_integer: bool = False

    @property
    def expected(self) -> str:
        """What the label may be, for error texts."""
        if self.values is not None:
            return " or ".join(repr(text) for text in self.values)
        return "an integer in [-2**24, 2**24]" if self.is_integer else "a finite number"


@dataclass(frozen=True)
class ColumnRoles:
    """What a job reads of a file with columns.

    Attributes:
        labels: the labels, at least one.
        numeric: the columns that are decoded as numbers.
        categorical: the columns that are decoded as keys.
        spec: the inputs that are made of them.
        others: columns that features read, which look at their types themselves.
        weight: the column of the samples' weights; None: there is none.
        group: the column of the samples' groups; None: there is none.
    """

    labels: tuple[LabelRole, ...]
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    spec: FeatureSpec
    others: tuple[str, ...] = ()
    weight: str | None = None
    group: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are read, each once."""
        beside = [name for name in (self.weight, self.group) if name is not None]
        labels = [label.column for label in self.labels]
        return tuple(dict.fromkeys([*labels, *self.numeric, *self.categorical, *self.others, *beside]))

    @property
    def coded(self) -> tuple[str, ...]:
        """The columns whose texts are looked up or hashed, so that each different text is best seen once."""
        texts = [label.column for label in self.labels if label.values is not None]
        return (*texts, *self.categorical, *self.others, *(() if self.group is None else (self.group,)))


def labels_of(schema: ColumnsSchema) -> tuple[LabelRole, ...]:
    """Returns the labels that ``data.columns`` names."""
    if schema.label is not None:
        values = {text: float(value) for text, value in schema.label_values.items()}
        return (LabelRole("data.columns.label", schema.label, values),)
    made = []
    for name, label in schema.labels.items():
        texts = None if label.dtype is not None else label.values or {"0": 0.0, "1": 1.0}
        made.append(LabelRole(f"data.columns.labels.{name}", label.column or name, texts, label.dtype == "int64"))
    return tuple(made)


def roles_of(schema: ColumnsSchema) -> ColumnRoles:
    """Returns the roles of the columns, by ``data.columns``.

    Raises:
        InvalidArgument: a column has two roles.
    """
    numeric = tuple(dict.fromkeys([*schema.numeric, *schema.buckets]))
    roles = [column for setting, column in schema.roles.items() if setting != "data.columns.group"]
    names = [*roles, *numeric, *schema.categorical]  # the group may be an input as well
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(
                f"data.columns: column {name} has two roles; allowed: one of label, sample_weight, categorical, "
                "or numeric and buckets"
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
        labels=tuple(schema.labels),
    )
    return ColumnRoles(
        labels_of(schema),
        numeric,
        schema.categorical,
        spec,
        weight=schema.sample_weight,
        group=schema.group,
    )


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
    for setting, name, allowed in _wanted(roles, filtered):
        found = schema.names.count(name)
        if found > 1:
            raise InvalidArgument(f"{path}: a column {name!r} stands twice; expected distinct names")
        if not found:
            near = difflib.get_close_matches(name, schema.names, n=_NEAREST, cutoff=0.5)
            listed = ", ".join(schema.names[:_LISTED]) + (", ..." if len(schema.names) > _LISTED else "")
            told = f"nearest: {', '.join(near)}" if near else f"it has {listed}"
            raise InvalidArgument(f"{setting}: no column {name!r} in {path}; {told}")
        kind = schema.field(name).type
        if allowed is not None and not any(is_allowed(kind) for is_allowed in _ALLOWED[allowed]):
            raise InvalidArgument(f"{setting}: column {name} of {path} is {kind}; expected {allowed}")


def _wanted(roles: ColumnRoles, filtered: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yields the columns to look for: the setting that names one, its name, and what it may be; None: anything."""
    for label in roles.labels:
        yield label.setting, label.column, _NUMBER if label.values is None else _ANY
    for name in roles.numeric:
        yield "data.columns.numeric or buckets", name, _NUMBER
    for name in roles.categorical:
        yield "data.columns.categorical", name, _TEXT
    for name in roles.others:
        yield "features", name, None
    if roles.weight is not None:
        yield "data.columns.sample_weight", roles.weight, _NUMBER
    if roles.group is not None:
        yield "data.columns.group", roles.group, _TEXT
    for name in filtered:
        yield "data.where", name, None


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


_NUMBER, _TEXT, _ANY = "a number", "a text or an integer", "a text or a number"
_ALLOWED = {_NUMBER: (_is_number,), _TEXT: (_is_text,), _ANY: (_is_number, _is_text)}


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
        roles = self._roles
        numeric, keys, lists = self.inputs(table, path)
        labels = np.stack([_labels(table.column(label.column), label) for label in roles.labels], axis=1)
        is_good = ~np.isnan(labels).any(axis=1) & (~(np.abs(numeric) > _FLOAT32_MAX)).all(axis=1)
        weights = None if roles.weight is None else _numbers(table.column(roles.weight)).astype(np.float32)
        if weights is not None:
            is_good &= (weights >= 0) & (weights < np.inf)
        groups = None if roles.group is None else _keys(table.column(roles.group))
        lines = Lines(numeric, keys, labels if len(roles.spec.labels) else labels[:, 0], lists, weights, groups)
        if is_good.all():
            return DecodedPart(lines)
        policy = BadLinePolicy(self._on_bad_line)
        bad = np.flatnonzero(~is_good)
        policy.meet(self._fault(table.slice(int(bad[0]), 1), lines.take(bad[:1]), path, int(numbers[bad[0]])))
        return DecodedPart(lines.take(np.flatnonzero(is_good)), len(bad), policy.first)

    def inputs(self, table: Any, path: str) -> Inputs:  # noqa: ARG002
        """Returns numbers, (n, numeric) float64 with NaN for missing ones, keys, (n, keys) int64, and lists.

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
        return numeric, keys, ()

    def none(self) -> Lines:
        """Returns no samples."""
        return self.without_rows(len(self._roles.numeric), len(self._roles.categorical), ())

    def without_rows(self, numbers: int, keys: int, lists: tuple[Jagged, ...]) -> Lines:
        """Returns no samples with so many numbers, keys and lists."""
        labels = len(self._roles.spec.labels)
        return Lines(
            np.empty((0, numbers)),
            np.empty((0, keys), dtype=np.int64),
            np.empty((0, labels) if labels else 0, dtype=np.float32),
            lists,
            None if self._roles.weight is None else np.empty(0, dtype=np.float32),
            None if self._roles.group is None else np.empty(0, dtype=np.int64),
        )

    def _fault(self, row: Any, lines: Lines, path: str, number: int) -> BadLine:
        roles = self._roles
        for label, value in zip(roles.labels, np.atleast_1d(lines.labels[0]), strict=True):
            if np.isnan(value):
                told = _shown_cell(row, label.column)
                text = f"{told} is not a label; expected {label.expected}"
                return BadLine(path, number, label.column, text, unit="row")
        if roles.weight is not None and lines.weights is not None and not 0 <= lines.weights[0] < np.inf:
            text = f"{_shown_cell(row, roles.weight)} is not a weight; expected a finite number >= 0"
            return BadLine(path, number, roles.weight, text, unit="row")
        at = int(np.flatnonzero(np.abs(lines.numeric[0]) > _FLOAT32_MAX)[0])
        told = repr(float(lines.numeric[0, at]))
        return BadLine(
            path, number, roles.numeric[at], f"{told} is not finite as float32; expected a number or null", unit="row"
        )


def _shown_cell(row: Any, column: str) -> str:
    value = row.column(column)[0].as_py()
    return "null" if value is None else shown(str(value).encode())


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
