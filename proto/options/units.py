"""Sizes and durations as people write them: ``8GiB``, ``10s``, ``250ms``."""

from __future__ import annotations

import math
import re
from typing import Literal, TypeAlias

from ..errors import InvalidArgument

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]

_BYTES = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6}
_BYTES |= {"GB": 10**9, "TB": 10**12}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

BYTES_FORM = "bytes, such as 512MiB or 8GiB (kB, MB, GB, TB, KiB, MiB, GiB, TiB)"
SECONDS_FORM = "seconds, such as 10, 10s, 250ms, 5min or 1h"


def _parse(value: object, units: dict[str, float], form: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return value
    match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise InvalidArgument(f"{value!r} is not allowed; allowed: {form}")
    return float(match[1]) * units[match[2]]


def parse_bytes(value: object) -> int:
    """Returns a number of bytes, from a number or a text with a unit.

    Raises:
        InvalidArgument: the value is neither, or is not a whole number of bytes.
    """
    amount = _parse(value, dict(_BYTES), BYTES_FORM)
    if amount != int(amount):
        raise InvalidArgument(f"{value!r} is not allowed; allowed: whole {BYTES_FORM}")
    return int(amount)


def parse_seconds(value: object) -> float:
    """Returns a number of seconds, from a number or a text with a unit.

    Raises:
        InvalidArgument: the value is neither.
    """
    return float(_parse(value, _SECONDS, SECONDS_FORM))


def format_bytes(count: int) -> str:
    """Returns a text in the largest binary unit that fits: ``1.5 GiB``; the number is exact below 1 KiB."""
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
