"""Reads timestamps, dates, texts of them and integers since 1970 from Arrow arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..config.data_config import TimeUnit
from .cells import is_plain_text

TIME_FORM = "a timestamp, a date, or a text of ISO 8601"
COUNT_FORM = f"{TIME_FORM}, or an integer of the given unit since 1970"
_COUNT = r"^-?\d{1,19}$"
_ZONE = r"[T ]\d.*(Z|[+-]\d\d(:?\d\d)?)$"


def moments(array: pa.Array, unit: TimeUnit | None = None) -> pa.Array:
    """Returns an array of timestamps with a zone; those without one, and texts without one, are in UTC.

    Args:
        array: timestamps, dates, or texts of ISO 8601, also as a dictionary. A text with a time may end in Z or an
            offset. With a unit also integers, or texts of them alone.
        unit: what integers count since 1970 in UTC; None: integers are no times.

    Raises:
        pa.ArrowTypeError: the array has none of them.
        pa.ArrowInvalid: a text is no timestamp, or a time is too far from 1970 for microseconds of 64 bits.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if unit is not None and is_plain_text(array.type):
        texts = array.cast(pa.large_string())
        if pc.all(pc.match_substring_regex(texts, _COUNT)).as_py() is not False:
            array = texts.cast(pa.int64())
    if is_plain_text(array.type):
        return _parsed(array.cast(pa.large_string()))
    if pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("ms"))
    if unit is not None and pa.types.is_integer(array.type):
        counted = array.cast(pa.int64()).cast(pa.timestamp(unit))
        counted.cast(pa.timestamp("us"), safe=unit != "ns")
        return pc.assume_timezone(counted, "UTC")
    if not pa.types.is_timestamp(array.type):
        raise pa.ArrowTypeError(f"{array.type} is no timestamp")
    return array if array.type.tz is not None else pc.assume_timezone(array, "UTC")


def _parsed(texts: pa.Array) -> pa.Array:
    utc, null = pa.timestamp("us", "UTC"), pa.scalar(None, pa.large_string())
    has_zone = pc.match_substring_regex(texts, _ZONE)
    if not pc.any(has_zone).as_py():
        return pc.assume_timezone(texts.cast(pa.timestamp("us")), "UTC")
    zoned, plain = pc.if_else(has_zone, texts, null), pc.if_else(has_zone, null, texts)
    return pc.coalesce(zoned.cast(utc), pc.assume_timezone(plain.cast(pa.timestamp("us")), "UTC"))


def are_no_times(texts: pa.Array, unit: TimeUnit | None = None) -> npt.NDArray[np.bool_]:
    """Returns which texts or integers are no timestamps, (n) bool; see :func:`moments`."""
    return np.array([_is_no_time(texts[at : at + 1], unit) for at in range(len(texts))], dtype=np.bool_)


def _is_no_time(text: pa.Array, unit: TimeUnit | None) -> bool:
    try:
        moments(text, unit)
    except pa.ArrowInvalid:
        return True
    return False


def microseconds(array: pa.Array, unit: TimeUnit | None = None) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Returns timestamps in microseconds since 1970 in UTC, (n) int64, and which cells have none, (n) bool.

    Args:
        array: as for :func:`moments`. Finer units are cut to microseconds.
        unit: as for :func:`moments`.

    Raises:
        pa.ArrowTypeError: as for :func:`moments`.
    """
    if pa.types.is_null(array.type):
        return np.zeros(len(array), dtype=np.int64), np.ones(len(array), dtype=np.bool_)
    try:
        found, is_bad = moments(array, unit), None
    except pa.ArrowInvalid:
        is_bad = are_no_times(array, unit)
        plain = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        found = moments(pc.if_else(pa.array(is_bad), pa.scalar(None, plain.type), plain), unit)
    whole = found.cast(pa.timestamp("us", "UTC"), safe=False).cast(pa.int64())
    is_null = whole.is_null().to_numpy(zero_copy_only=False)
    return whole.fill_null(0).to_numpy(zero_copy_only=False), is_null
