"""Makes the arrays of one feature from columns. Each function is pure, and vectorised over rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..row_keys import hash_key
from .base import Feature, HashUnknown, KeyOptions
from .cells import Cells, Lists, Tokens, kept_positions
from .jagged import Jagged, offsets_of
from .kinds import (
    BucketizedFeature,
    CrossFeature,
    IdFeature,
    MultiHotFeature,
    NumericFeature,
    SequenceFeature,
    SplitFeature,
    TimeFeature,
)
from .statistics import Statistics
from .times import COUNT_FORM, TIME_FORM, are_no_times, moments
from .vocabulary import Vocabulary

# The function of each part of a time, and its first value.
_PARTS = {"hour": (pc.hour, 0), "weekday": (pc.day_of_week, 0), "day": (pc.day, 1), "month": (pc.month, 1)}


_SHOWN_CHARACTERS = 40

Array: TypeAlias = "npt.NDArray[np.float32] | npt.NDArray[np.int64] | Jagged"


def numbers_before_statistics(feature: Feature, cells: Cells) -> npt.NDArray[np.float64]:
    """Returns the numbers that statistics of a feature are of, (n) float64 with NaN for nulls.

    Args:
        feature: a feature of numbers or of buckets; of the former the numbers are those after ``clip`` and ``log1p``.
        cells: the columns.
    """
    assert isinstance(feature, NumericFeature | BucketizedFeature)
    values = cells.numbers(feature.columns[0], refuses_null=feature.on_null == "refuse")
    if isinstance(feature, BucketizedFeature):
        return values
    if feature.clip is not None:
        values = np.clip(values, *feature.clip)
    if not feature.log1p:
        return values
    logs = np.abs(values)
    np.log1p(logs, out=logs)
    return np.copysign(logs, values, out=logs)


def computed(feature: Feature, cells: Cells, statistics: Statistics | None, vocabulary: Vocabulary | None) -> Array:
    """Returns the values of a feature.

    Args:
        feature: the feature.
        cells: the columns.
        statistics: (mean, std), (low, high) or edges, where the feature has some.
        vocabulary: the keys of tokens; None: they are hashed.

    Raises:
        InvalidArgument: a column is missing, or does not fit; the text names it.
    """
    if isinstance(feature, NumericFeature):
        return scaled(feature, numbers_before_statistics(feature, cells), statistics)
    if isinstance(feature, BucketizedFeature):
        assert statistics is not None
        return bucket_of(feature, numbers_before_statistics(feature, cells), statistics)
    if isinstance(feature, IdFeature):
        column = feature.columns[0]
        array = cells.column(column, refuses_null=feature.on_null == "refuse")
        return _keys(feature, column, array, vocabulary, cells)
    if isinstance(feature, CrossFeature):
        return _cross(feature, cells)
    if isinstance(feature, TimeFeature):
        return _part_of_time(feature, cells)
    assert isinstance(feature, MultiHotFeature | SequenceFeature | SplitFeature)
    return _list_of_keys(feature, cells, vocabulary)


def scaled(
    feature: NumericFeature, values: npt.NDArray[np.float64], statistics: Statistics | None
) -> npt.NDArray[np.float32]:
    """Returns the values of a feature of numbers, (n) float32.

    Args:
        feature: the feature.
        values: the numbers after ``clip`` and ``log1p``, (n) float64; NaN is a missing one.
        statistics: (mean, std) or (low, high); None without ``scale``.
    """
    if feature.scale != "none":
        assert statistics is not None
        first, second = statistics
        values = (values - first) / (second if feature.scale == "standardize" else second - first)
    out: npt.NDArray[np.float32] = np.where(np.isnan(values), feature.default, values).astype(np.float32)
    return out


def bucket_of(feature: BucketizedFeature, values: npt.NDArray[np.float64], edges: Statistics) -> npt.NDArray[np.int64]:
    """Returns the number of the bucket that each number falls into, (n) int64; a bucket includes its left edge.

    Args:
        feature: the feature.
        values: the numbers, (n) float64; NaN is a missing one.
        edges: the edges between buckets, ascending.
    """
    buckets = np.searchsorted(np.array(edges), values, side="right")
    return np.where(np.isnan(values), feature.null_bucket, buckets).astype(np.int64)


def _keys(
    feature: KeyOptions,
    name: str,
    array: pa.Array,
    vocabulary: Vocabulary | None,
    cells: Cells,
    lengths: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """Returns the key of each cell of an array that belongs to the column ``name``, (n) int64.

    Args:
        feature: the feature.
        name: the name of the column.
        array: the cells, or the elements of its lists.
        vocabulary: the keys of tokens; None: they are hashed.
        cells: the columns.
        lengths: the length of each list, (rows) int64; None: a cell a row.
    """
    tokens = cells.tokens_of(name, array, is_distinct=vocabulary is not None)
    default = str(feature.default).encode()
    if vocabulary is None:
        keys = np.append(tokens.hashed(cells.hasher), hash_key(default))  # the code -1 takes the last one
        return (keys if feature.modulo is None else keys % feature.modulo)[tokens.codes]
    texts = pa.concat_arrays([tokens.texts, pa.array([default], pa.large_binary())])
    lines = vocabulary.lines(texts)
    unknown, keys = lines < 0, lines + feature.unknown_rows
    if not unknown.any():
        return keys[tokens.codes]
    if isinstance(feature.unknown, HashUnknown):
        hashed = Tokens(tokens.codes, texts).hashed(cells.hasher) % feature.unknown.hash
        keys = np.where(unknown, hashed, keys)
    used = keys[tokens.codes]
    if feature.unknown == "refuse" and (used < 0).any():
        first = int(np.flatnonzero(used < 0)[0])
        token = texts[int(tokens.codes[first]) % len(texts)].as_py().decode(errors="replace")
        rows = used < 0 if lengths is None else _rows_of(used < 0, lengths)
        problem = f"has {token!r}, which is not in the vocabulary {vocabulary.name}, and unknown is refuse"
        raise cells.refuse_row(name, rows, lambda _: problem)
    return used


def _cross(feature: CrossFeature, cells: Cells) -> npt.NDArray[np.int64]:
    parts = [cells.tokens(column) for column in feature.of]
    combined = np.zeros(len(parts[0].codes), dtype=np.int64)
    for part in parts:  # a distinct number for each combination so far, below the number of rows
        mixed = combined * (len(part.texts) + 1) + part.codes + 1
        combined = np.unique(mixed, return_inverse=True)[1].astype(np.int64)
    _, first, inverse = np.unique(combined, return_index=True, return_inverse=True)
    rows = zip(*(part.codes[first].tolist() for part in parts), strict=True)
    texts = [part.texts.to_pylist() for part in parts]
    keys = np.fromiter(
        (hash_key(tuple(_text(some, code) for some, code in zip(texts, row, strict=True))) for row in rows),
        dtype=np.int64,
        count=len(first),
    )  # fmt: skip
    return (keys if feature.modulo is None else keys % feature.modulo)[inverse]


def _text(texts: list[bytes], code: int) -> bytes:
    return b"" if code < 0 else texts[code]


def _part_of_time(feature: TimeFeature, cells: Cells) -> npt.NDArray[np.int64]:
    column = feature.columns[0]
    array = cells.column(column, refuses_null=feature.on_null == "refuse")
    part, first = _PARTS[feature.part]
    if pa.types.is_null(array.type):
        return np.full(len(array), feature.null_key, dtype=np.int64)
    try:
        found = moments(array, feature.unit)
    except pa.ArrowTypeError:
        form = COUNT_FORM if feature.unit is not None else f"{TIME_FORM} is needed, or a unit: of integers"
        raise cells.refuse(column, f"has type {array.type}; {form}") from None
    except pa.ArrowInvalid:
        raise cells.refuse_row(
            column, are_no_times(array, feature.unit), lambda row: f"is no timestamp: {_short(array[row])}"
        ) from None
    local = found.cast(pa.timestamp(found.type.unit, tz=feature.zone))
    values = pc.fill_null(pc.subtract(pc.cast(part(local), pa.int64()), first), feature.null_key)
    return np.array(values.to_numpy(zero_copy_only=False), dtype=np.int64)


def _short(text: pa.Scalar) -> str:
    value = text.as_py()
    if isinstance(value, bytes):
        value = value.decode(errors="backslashreplace")
    return repr(value[:_SHOWN_CHARACTERS]) if isinstance(value, str) else repr(value)


def _rows_of(items: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Returns which lists have an element that is true, (n) bool.

    Args:
        items: the elements of all lists, (m) bool.
        lengths: the length of each list, (n) int64.
    """
    rows = np.zeros(len(lengths), dtype=np.bool_)
    rows[np.repeat(np.arange(len(lengths)), lengths)[items]] = True
    return rows


def check_zone(name: str) -> bool:
    """Returns whether a time zone of this name is known here."""
    try:
        ZoneInfo(name)
    except (ValueError, KeyError, OSError):
        return False
    return True


def _list_of_keys(
    feature: MultiHotFeature | SequenceFeature | SplitFeature, cells: Cells, vocabulary: Vocabulary | None
) -> Jagged:
    column = feature.columns[0]
    refuses = feature.on_null == "refuse"
    if isinstance(feature, SplitFeature):
        lists = _split(feature, cells, column, refuses)
    else:
        lists = cells.lists(column, refuses_null=refuses)
    items = lists.items
    if refuses and items.null_count:
        rows = _rows_of(items.is_null().to_numpy(zero_copy_only=False), lists.lengths)
        raise cells.refuse_row(column, rows, lambda _: "has a null in its list, which on_null refuses")
    values = _keys(feature, column, items, vocabulary, cells, lists.lengths)
    made = Jagged(values, offsets_of(lists.lengths), _weights(feature, cells, lists))
    return _cut(feature, made, lists.lengths, cells, column)


def _split(feature: SplitFeature, cells: Cells, column: str, refuses: bool) -> Lists:
    tokens = cells.tokens(column, refuses_null=refuses)
    parts = pc.split_pattern(pc.cast(tokens.texts, pa.binary()), feature.delimiter)
    lengths = pc.list_value_length(parts).to_numpy(zero_copy_only=False).astype(np.int64)
    lengths[pc.binary_length(tokens.texts).to_numpy(zero_copy_only=False) == 0] = 0  # an empty text has no part
    of_text = pa.ListArray.from_arrays(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        pc.list_flatten(parts).filter(_parts_kept(parts, lengths)),
    )
    lists = pa.concat_arrays([of_text, pa.array([[]], of_text.type)]).take(pa.array(tokens.codes % (len(of_text) + 1)))
    return Lists(pc.list_flatten(lists), pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64))


def _parts_kept(parts: pa.Array, lengths: npt.NDArray[np.int64]) -> pa.Array:
    """Returns which parts of texts count, as an Arrow array: those of texts that are not empty."""
    found = pc.list_value_length(parts).to_numpy(zero_copy_only=False)
    return pa.array(np.repeat(lengths > 0, found))


def _weights(feature: KeyOptions, cells: Cells, lists: Lists) -> npt.NDArray[np.float32] | None:
    name = feature.weights if isinstance(feature, MultiHotFeature) else None
    if name is None:
        return None
    weights = cells.lists(name)
    if not np.array_equal(weights.lengths, lists.lengths):
        raise cells.refuse_row(
            name,
            weights.lengths != lists.lengths,
            lambda row: f"has {weights.lengths[row]} weights for {lists.lengths[row]} keys; each key needs one",
        )
    values = pc.cast(weights.items, pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    numbers: npt.NDArray[np.float32] = values.astype(np.float32)
    if not np.isfinite(numbers).all():
        rows = _rows_of(~np.isfinite(numbers), lists.lengths)
        raise cells.refuse_row(name, rows, lambda _: "has a weight that is null or not finite")
    return numbers


def _cut(feature: KeyOptions, made: Jagged, lengths: npt.NDArray[np.int64], cells: Cells, column: str) -> Jagged:
    most: int | None = feature.max_len  # type: ignore[attr-defined]
    if most is None or not (lengths > most).any():
        return made
    if isinstance(feature, MultiHotFeature):
        raise cells.refuse_row(
            column, lengths > most, lambda row: f"has {lengths[row]} keys; allowed: at most {most} (max_len)"
        )
    stays = kept_positions(lengths, most, feature.keep)  # type: ignore[attr-defined]
    return replace(made, values=made.values[stays], offsets=offsets_of(np.minimum(lengths, most)))
