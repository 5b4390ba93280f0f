"""Checks arguments of callers, and names the one that is wrong and what is allowed."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from .errors import not_allowed


def check_integer(field: str, value: Any, least: int) -> None:
    """Refuses what is no integer, or is below the least one that is allowed.

    Args:
        field: the name of the argument, which begins the text.
        value: the argument.
        least: the least value.

    Raises:
        InvalidArgument: the value is not allowed.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise not_allowed(field, value, f"integers >= {least}")


def check_number(field: str, value: Any, *, or_zero: bool = False) -> None:
    """Refuses what is no number, or is not above 0; see :func:`check_integer`.

    Args:
        field: the name of the argument, which begins the text.
        value: the argument.
        or_zero: whether 0 is allowed too.

    Raises:
        InvalidArgument: the value is not allowed.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not (value > 0 or (or_zero and value == 0)):
        raise not_allowed(field, value, "numbers >= 0" if or_zero else "numbers > 0")
