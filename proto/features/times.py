"""Reads timestamps, dates, texts of them and integers since 1970 from Arrow arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..options.units import TimeUnit
from .cells import is_plain_text

TIME_FORM = "a timestamp, a date, or a text of ISO 8601"
COUNT_FORM = f"{TIME_FORM}, or an integer of the given unit since 1970"
_COUNT = r"^-?\d{1,19}$"
_ZONE = r"[T ]\d.*(Z|[+-]\d\d(:?\d\d)?)$"
_LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    r"(\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_HOUR, _SIXTIETH = r"([01]\d|2[0-3])", r"[0-5]\d"
_CLOCK = rf"{_HOUR}(:{_SIXTIETH}(:{_SIXTIETH}(\.\d{{1,6}})?)?)?(Z|[+-]{_HOUR}(:?{_SIXTIETH})?)?"
_TIME = rf"^{_DATE}([T ]{_CLOCK})?$"  # exactly what Arrow parses, for it says of a whole array that a text is none
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


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
        is_count = pc.match_substring_regex(texts, _COUNT)
        if pc.all(is_count).as_py() is not False:
            array = texts.cast(pa.int64())
        elif pc.any(is_count).as_py():
            counts, others = _divided(texts, is_count)
            microsecond = pa.timestamp("us", "UTC")
            return pc.coalesce(moments(counts.cast(pa.int64()), unit).cast(microsecond, safe=False), _parsed(others))
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
    has_zone = pc.match_substring_regex(texts, _ZONE)
    if not pc.any(has_zone).as_py():
        return pc.assume_timezone(texts.cast(pa.timestamp("us")), "UTC")
    zoned, plain = _divided(texts, has_zone)
    return pc.coalesce(zoned.cast(pa.timestamp("us", "UTC")), pc.assume_timezone(plain.cast(pa.timestamp("us")), "UTC"))


def _divided(texts: pa.Array, is_first: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Returns the texts of which ``is_first`` is true, and the others, with nulls in place of those left out."""
    null = pa.scalar(None, texts.type)
    return pc.if_else(is_first, texts, null), pc.if_else(is_first, null, texts)


def are_no_times(array: pa.Array, unit: TimeUnit | None = None) -> npt.NDArray[np.bool_]:
    """Returns which texts or integers are no timestamps, (n) bool, in one pass; see :func:`moments`."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_plain_text(array.type):
        texts = array.cast(pa.large_string())
        is_time = pc.match_substring_regex(texts, _TIME)
        if unit is not None:
            counts, _ = _divided(texts, pc.match_substring_regex(texts, _COUNT))
            is_time = pc.or_(is_time, pc.fill_null(_are_near(counts, unit), fill_value=False))
    elif unit is not None and pa.types.is_integer(array.type):
        is_time = _are_near(array, unit)
    else:
        return np.zeros(len(array), dtype=np.bool_)
    is_bad: npt.NDArray[np.bool_] = pc.invert(pc.fill_null(is_time, fill_value=True)).to_numpy(zero_copy_only=False)
    return is_bad


def _are_near(counts: pa.Array, unit: TimeUnit) -> pa.Array:
    """Returns which integers, or texts of them, are so near to 1970 that microseconds of 64 bits hold them."""
    whole = counts.cast(pa.decimal128(20, 0))  # which holds every integer of 64 bits, and of 19 digits
    times = {"s": 1_000_000, "ms": 1_000}.get(unit, 1)
    most = pa.scalar(_MOST // times).cast(whole.type)
    least = pa.scalar(-(-_LEAST // times)).cast(whole.type)
    return pc.and_(pc.greater_equal(whole, least), pc.less_equal(whole, most))


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
