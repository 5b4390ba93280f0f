"""Makes the arrays of one feature from columns. Each function is pure, and vectorised over rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..row_keys import hash_key, hash_keys
from .cells import Cells, Lists, Tokens, kept_positions
from .kinds import (
    BucketizedFeature,
    CrossFeature,
    Feature,
    HashUnknown,
    IdFeature,
    KeyOptions,
    MultiHotFeature,
    NumericFeature,
    OneColumn,
    SequenceFeature,
    SplitFeature,
    TimeFeature,
)
from .vocabulary import Vocabulary

Statistics: TypeAlias = tuple[float, ...]

_PARTS = {
    "hour": (pc.hour, 0, 24),
    "weekday": (pc.day_of_week, 0, 7),
    "day": (pc.day, 1, 31),
    "month": (pc.month, 1, 12),
}


@dataclass(frozen=True)
class Jagged:
    """Keys of lists, one list for each row.

    Attributes:
        values: the keys of all lists, one after another, (m) int64.
        offsets: where each list begins in ``values``, and the end of the last one, (n + 1) int64.
        weights: the weight of each key, (m) float32; None: there are none.
    """

    values: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None = None

    @property
    def parts(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays that there are: (values, offsets), or (values, offsets, weights)."""
        return (self.values, self.offsets) if self.weights is None else (self.values, self.offsets, self.weights)


Array: TypeAlias = "npt.NDArray[np.float32] | npt.NDArray[np.int64] | Jagged"


def numbers_before_scale(feature: NumericFeature, cells: Cells) -> npt.NDArray[np.float64]:
    """Returns the numbers of a feature after ``clip`` and ``log1p``, (n) float64 with NaN for nulls."""
    values = _numbers(feature, cells)
    if feature.clip is not None:
        values = np.clip(values, *feature.clip)
    return np.sign(values) * np.log1p(np.abs(values)) if feature.log1p else values


def numbers_before_buckets(feature: BucketizedFeature, cells: Cells) -> npt.NDArray[np.float64]:
    """Returns the numbers of a feature, (n) float64 with NaN for nulls."""
    return _numbers(feature, cells)


def _numbers(feature: OneColumn, cells: Cells) -> npt.NDArray[np.float64]:
    return cells.numbers(feature.columns[0], refuses_null=feature.on_null == "refuse")


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
        return _numeric(feature, cells, statistics)
    if isinstance(feature, BucketizedFeature):
        assert statistics is not None
        values = numbers_before_buckets(feature, cells)
        buckets = np.searchsorted(np.array(statistics), values, side="right")
        return np.where(np.isnan(values), feature.null_bucket, buckets).astype(np.int64)
    if isinstance(feature, IdFeature):
        column = feature.columns[0]
        tokens = cells.tokens(column, refuses_null=feature.on_null == "refuse")
        return _keys(feature, tokens, vocabulary, cells, column)
    if isinstance(feature, CrossFeature):
        return _cross(feature, cells)
    if isinstance(feature, TimeFeature):
        return _part_of_time(feature, cells)
    assert isinstance(feature, MultiHotFeature | SequenceFeature | SplitFeature)
    return _list_of_keys(feature, cells, vocabulary)


def _numeric(feature: NumericFeature, cells: Cells, statistics: Statistics | None) -> npt.NDArray[np.float32]:
    values = numbers_before_scale(feature, cells)
    if feature.scale != "none":
        assert statistics is not None
        first, second = statistics
        values = (values - first) / (second if feature.scale == "standardize" else second - first)
    out: npt.NDArray[np.float32] = np.where(np.isnan(values), feature.default, values).astype(np.float32)
    return out


def _keys(
    feature: KeyOptions, tokens: Tokens, vocabulary: Vocabulary | None, cells: Cells, column: str
) -> npt.NDArray[np.int64]:
    """Returns the key of each token, (n) int64."""
    texts = [*tokens.texts, str(feature.default).encode()]  # the last one is taken by the code -1
    if vocabulary is None:
        keys = hash_keys(texts)
        return (keys if feature.modulo is None else keys % feature.modulo)[tokens.codes]
    keys = vocabulary.keys(texts)
    unknown = keys < 0
    if unknown.any():
        keys[unknown] = _unknown(
            feature, vocabulary, [text for text, is_it in zip(texts, unknown, strict=True) if is_it]
        )
        used = keys[tokens.codes]
        if feature.unknown == "refuse" and (used < 0).any():
            row = int(np.flatnonzero(used < 0)[0])
            token = texts[tokens.codes[row]].decode(errors="replace")
            raise cells.refuse(column, f"{token!r} is not in the vocabulary {vocabulary.name}, and unknown is refuse")
    return keys[tokens.codes]


def _unknown(feature: KeyOptions, vocabulary: Vocabulary, texts: list[bytes]) -> npt.NDArray[np.int64] | int:
    if isinstance(feature.unknown, HashUnknown):
        return len(vocabulary) + hash_keys(texts) % feature.unknown.hash
    return len(vocabulary) if feature.unknown == "row" else -1


def _cross(feature: CrossFeature, cells: Cells) -> npt.NDArray[np.int64]:
    parts = [cells.tokens(column) for column in feature.of]
    combined = np.zeros(len(parts[0].codes), dtype=np.int64)
    for part in parts:  # a distinct number for each combination so far, below the number of rows
        mixed = combined * (len(part.texts) + 1) + part.codes + 1
        combined = np.unique(mixed, return_inverse=True)[1].astype(np.int64)
    _, first, inverse = np.unique(combined, return_index=True, return_inverse=True)
    rows = zip(*(part.codes[first].tolist() for part in parts), strict=True)
    keys = np.fromiter(
        (hash_key(tuple(b"" if code < 0 else part.texts[code] for part, code in zip(parts, row, strict=True)))
         for row in rows),
        dtype=np.int64,
        count=len(first),
    )  # fmt: skip
    return (keys if feature.modulo is None else keys % feature.modulo)[inverse]


def _part_of_time(feature: TimeFeature, cells: Cells) -> npt.NDArray[np.int64]:
    column = feature.columns[0]
    array = cells.column(column, refuses_null=feature.on_null == "refuse")
    part, first, count = _PARTS[feature.part]
    if pa.types.is_null(array.type):
        return np.full(len(array), count, dtype=np.int64)
    if not pa.types.is_timestamp(array.type):
        raise cells.refuse(column, f"has type {array.type}; a timestamp is needed")
    moments = array if array.type.tz is not None else pc.assume_timezone(array, "UTC")
    local = moments.cast(pa.timestamp(array.type.unit, tz=feature.zone))
    values = pc.fill_null(pc.subtract(pc.cast(part(local), pa.int64()), first), count)
    return np.array(values.to_numpy(zero_copy_only=False), dtype=np.int64)


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
        raise cells.refuse(column, "a list has a null, which on_null refuses")
    values = _keys(feature, cells.tokens_of(column, items), vocabulary, cells, column)
    made = Jagged(values, _offsets_of(lists.lengths), _weights(feature, cells, lists))
    return _cut(feature, made, lists.lengths, cells, column)


def _split(feature: SplitFeature, cells: Cells, column: str, refuses: bool) -> Lists:
    tokens = cells.tokens(column, refuses_null=refuses)
    distinct = [text.split(feature.delimiter.encode()) if text else [] for text in tokens.texts]
    lists = pa.array([*distinct, []], type=pa.list_(pa.binary())).take(pa.array(np.where(
        tokens.codes < 0, len(distinct), tokens.codes)))  # fmt: skip
    return Lists(pc.list_flatten(lists), pc.list_value_length(lists).to_numpy().astype(np.int64))


def _weights(feature: KeyOptions, cells: Cells, lists: Lists) -> npt.NDArray[np.float32] | None:
    name = feature.weights if isinstance(feature, MultiHotFeature) else None
    if name is None:
        return None
    weights = cells.lists(name)
    if not np.array_equal(weights.lengths, lists.lengths):
        row = int(np.flatnonzero(weights.lengths != lists.lengths)[0])
        raise cells.refuse(
            name, f"row {row} has {weights.lengths[row]} weights for {lists.lengths[row]} keys; each key needs one"
        )
    values = pc.cast(weights.items, pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    numbers: npt.NDArray[np.float32] = values.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise cells.refuse(name, "a weight is null or not finite")
    return numbers


def _cut(feature: KeyOptions, made: Jagged, lengths: npt.NDArray[np.int64], cells: Cells, column: str) -> Jagged:
    most: int | None = feature.max_len  # type: ignore[attr-defined]
    if most is None or not (lengths > most).any():
        return made
    if isinstance(feature, MultiHotFeature):
        row = int(np.flatnonzero(lengths > most)[0])
        raise cells.refuse(column, f"row {row} has {lengths[row]} keys; allowed: at most {most} (max_len)")
    stays = kept_positions(lengths, most, feature.keep)  # type: ignore[attr-defined]
    return replace(made, values=made.values[stays], offsets=_offsets_of(np.minimum(lengths, most)))


def _offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
