"""Reads Arrow columns for features: numbers, tokens and lists, without Python for each row.

An error names the feature, the column, and where the data come from; nothing is guessed of a column that does not fit.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InvalidArgument
from ..row_keys import TextHasher

Columns: TypeAlias = "pa.Table | pa.RecordBatch | Mapping[str, Any]"

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class RefusedRow(InvalidArgument):
    """The error for rows that a feature refuses, while its column fits. The text is about the first of them.

    Attributes:
        column: the name of the column.
        rows: which of the rows that were given are refused for one reason, (n) bool; other rows may be for another.
        row: the number of the first of them, from 0.
        problem: what is wrong with its cell, as a sentence about it.
    """

    def __init__(self, text: str, column: str, rows: npt.NDArray[np.bool_], problem: str) -> None:
        super().__init__(text)
        self.column, self.rows, self.problem = column, rows, problem
        self.row = int(np.argmax(rows))

    def __reduce__(self) -> tuple[type[RefusedRow], tuple[str, str, npt.NDArray[np.bool_], str]]:
        """Makes the error picklable, as it crosses processes."""
        return RefusedRow, (str(self), self.column, self.rows, self.problem)


@dataclass(frozen=True)
class Tokens:
    """The texts of a column.

    Attributes:
        codes: the number of each cell's text, (n) int64; -1 for a null.
        texts: the texts as a large binary array of UTF-8 without nulls. One may be there twice.
    """

    codes: npt.NDArray[np.int64]
    texts: pa.Array

    def hashed(self, hasher: TextHasher) -> npt.NDArray[np.int64]:
        """Returns the key of each of ``texts``, (number of texts) int64."""
        return hashed_texts(self.texts, hasher)


_NO_TEXTS = pa.nulls(0, pa.large_binary())  # pa.array would import pandas where it is installed


@dataclass(frozen=True)
class Lists:
    """The cells of a list column.

    Attributes:
        items: the elements of all lists, one after another, as an Arrow array.
        lengths: the length of each list, (n) int64; 0 for a null.
    """

    items: pa.Array
    lengths: npt.NDArray[np.int64]


def table_of(columns: Columns, where: str) -> pa.Table:
    """Returns columns as a table.

    Args:
        columns: a table, a record batch, or a mapping from names to sequences of the same length.
        where: where the data come from, which begins error texts.

    Raises:
        InvalidArgument: a column is not one that Arrow can take, or their lengths differ.
    """
    if isinstance(columns, pa.Table):
        return columns
    if isinstance(columns, pa.RecordBatch):
        return pa.Table.from_batches([columns])
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = values if isinstance(values, pa.Array | pa.ChunkedArray) else _array_of(values)
        except (
            OverflowError,
            pa.ArrowInvalid,
            pa.ArrowTypeError,
            pa.ArrowNotImplementedError,
            TypeError,
            ValueError,
        ) as error:
            raise InvalidArgument(f"{where}: column {name!r}: Arrow cannot take it: {error}") from None
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise InvalidArgument(f"{where}: the columns have different lengths: {said}")
    return pa.table(arrays)


def _array_of(values: Any) -> pa.Array:
    try:
        return pa.array(values)
    except OverflowError:  # beyond int64, which Arrow tries first
        return pa.array(values, pa.uint64())


class Cells:
    """The columns of some rows, as one feature reads them.

    Args:
        table: the rows.
        feature: the name of the feature, for error texts.
        where: where the data come from, which begins error texts.
        hasher: makes keys of texts.

    Attributes:
        hasher: the argument of that name.
    """

    def __init__(self, table: pa.Table, feature: str, where: str, hasher: TextHasher) -> None:
        self._table, self._feature, self._where, self.hasher = table, feature, where, hasher

    def refuse(self, column: str, text: str) -> InvalidArgument:
        """Returns the error of a column that does not fit."""
        return InvalidArgument(f"{self._where}: column {column!r} of feature {self._feature!r}: {text}")

    def refuse_row(self, column: str, rows: npt.NDArray[np.bool_], problem: Callable[[int], str]) -> RefusedRow:
        """Returns the error of the rows that do not fit.

        Args:
            column: the name of the column.
            rows: which rows do not fit, (n) bool.
            problem: returns what is wrong with a row, by its number from 0, as words about it.
        """
        row = int(np.argmax(rows))
        text = f"{self._where}: column {column!r} of feature {self._feature!r}: row {row} {problem(row)}"
        return RefusedRow(text, column, rows, f"it {problem(row)} (feature {self._feature})")

    def column(self, name: str, *, refuses_null: bool = False) -> pa.Array:
        """Returns a column as one array.

        Raises:
            InvalidArgument: there is no such column, and the text has the nearest names; or it has a null.
        """
        found = self._table.schema.get_all_field_indices(name)
        if len(found) != 1:
            names = self._table.schema.names
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:8]
            count = "there is no such column" if not found else f"there are {len(found)} columns of this name"
            raise self.refuse(name, f"{count}; the nearest names: {', '.join(near) or 'none, as there is no column'}")
        array = whole(self._table.column(found[0]))
        if refuses_null and (is_null := _nulls(array)) is not None:
            raise self.refuse_row(name, is_null, lambda _: "is null, which on_null refuses")
        return array

    def numbers(self, name: str, *, refuses_null: bool = False) -> npt.NDArray[np.float64]:
        """Returns the numbers of a column, (n) float64 with NaN for nulls. NaN in the column is a null as well.

        Raises:
            InvalidArgument: the column has no numbers, or one that is not finite as a float32, or a null.
        """
        array = self.column(name, refuses_null=refuses_null)
        kind = array.type
        if pa.types.is_null(kind):
            return np.full(len(array), np.nan)
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
        if not (is_number or pa.types.is_boolean(kind)):
            raise self.refuse(name, f"has type {kind}; a number is needed")
        numbers: npt.NDArray[np.float64] = pc.cast(array, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            return numbers  # a null is NaN, and every integer is finite as a float32
        is_bad = np.abs(numbers) > _FLOAT32_MAX
        if is_bad.any():
            raise self.refuse_row(name, is_bad, lambda row: f"is {numbers[row]}, which is not finite as a float32")
        if refuses_null and (is_nan := np.isnan(numbers)).any():
            raise self.refuse_row(name, is_nan, lambda _: "is NaN, which on_null refuses as a null")
        return numbers

    def tokens(self, name: str, *, refuses_null: bool = False) -> Tokens:
        """Returns the texts of a column of integers, booleans or texts, each distinct one once.

        Raises:
            InvalidArgument: the column has neither, or a null.
        """
        return self.tokens_of(name, self.column(name, refuses_null=refuses_null))

    def tokens_of(self, name: str, array: pa.Array, *, is_distinct: bool = True) -> Tokens:
        """Returns the texts of an array that belongs to the column ``name``; see :meth:`tokens`.

        Args:
            name: the name of the column.
            array: the array.
            is_distinct: whether each distinct text is there once; otherwise an array without a dictionary has a text
                for each cell.
        """
        if pa.types.is_null(array.type):
            return Tokens(np.full(len(array), -1, dtype=np.int64), _NO_TEXTS)
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.int8())
        if not pa.types.is_dictionary(array.type):
            self._check_tokens(name, array.type)
            if not is_distinct:
                codes = np.where(array.is_null().to_numpy(zero_copy_only=False), -1, np.arange(len(array)))
                return Tokens(codes, texts_of(array))
            array = array.dictionary_encode()
        values = array.dictionary
        if pa.types.is_null(values.type):
            return Tokens(np.full(len(array), -1, dtype=np.int64), _NO_TEXTS)
        self._check_tokens(name, values.type)
        codes = array.indices.fill_null(-1) if array.null_count else array.indices
        numbers = codes.to_numpy(zero_copy_only=False).astype(np.int64)
        if values.null_count:  # a dictionary may have a null as well
            is_null = values.is_null().to_numpy(zero_copy_only=False)
            numbers = np.where(is_null[numbers] & (numbers >= 0), -1, numbers)
        return Tokens(numbers, texts_of(values))

    def _check_tokens(self, name: str, kind: pa.DataType) -> None:
        if not (is_plain_text(kind) or pa.types.is_integer(kind)):
            raise self.refuse(name, f"has type {kind}; an integer or a text is needed")

    def lists(self, name: str, *, refuses_null: bool = False) -> Lists:
        """Returns the lists of a column.

        Raises:
            InvalidArgument: the column has no lists, or a null.
        """
        array = self.column(name, refuses_null=refuses_null)
        if pa.types.is_null(array.type):
            return Lists(pa.array([], pa.string()), np.zeros(len(array), dtype=np.int64))
        is_list = any(test(array.type) for test in (pa.types.is_list, pa.types.is_large_list,
                                                    pa.types.is_fixed_size_list))  # fmt: skip
        if not is_list:
            raise self.refuse(name, f"has type {array.type}; a list is needed")
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        return Lists(pc.list_flatten(array), lengths)


def is_plain_text(kind: pa.DataType) -> bool:
    """Returns whether a type is text or bytes, and no dictionary of them."""
    types = pa.types
    return any(
        test(kind)
        for test in (types.is_string, types.is_large_string, types.is_string_view,
                     types.is_binary, types.is_large_binary, types.is_binary_view)
    )  # fmt: skip


def whole(chunks: pa.ChunkedArray) -> pa.Array:
    """Returns a column of a table as one array."""
    if chunks.num_chunks > 1 and pa.types.is_dictionary(chunks.type):
        # The values of all chunks together may be more than the chunks' own indices can count.
        chunks = chunks.cast(pa.dictionary(pa.int32(), chunks.type.value_type))
    array = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of an empty column
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array


def _nulls(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Returns which cells are null, (n) bool, also where a dictionary has the null; None: there is none."""
    if pa.types.is_dictionary(array.type) and array.dictionary.null_count:
        array = array.dictionary_decode()
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def texts_of(values: pa.Array) -> pa.Array:
    """Returns texts, bytes or integers as a large binary array; a null has the empty text."""
    kind = values.type
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    made = pc.cast(values if is_bytes else pc.cast(values, pa.large_string()), pa.large_binary())
    return made.fill_null(b"") if made.null_count else made


def hashed_texts(texts: pa.Array, hasher: TextHasher) -> npt.NDArray[np.int64]:
    """Returns the key of each text of a large binary array without nulls, (n) int64."""
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets, np.int64, count=len(texts) + 1, offset=texts.offset * 8)
    return hasher(places, b"" if data is None else data)


def kept_positions(lengths: npt.NDArray[np.int64], most: int, keep: str) -> npt.NDArray[np.bool_]:
    """Returns which elements of lists stay when each list is cut, (sum of lengths) bool.

    Args:
        lengths: the length of each list, (n) int64.
        most: the number of elements that stay of a list at most.
        keep: "first" or "last", the end that stays.
    """
    begins = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum())) - np.repeat(begins, lengths)
    if keep == "first":
        return np.asarray(places < most)
    return np.asarray(places >= np.repeat(lengths, lengths) - most)
