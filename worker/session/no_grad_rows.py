"""Limits, in bytes and in seconds, of the rows that a step's lookups without gradient keep."""

from __future__ import annotations

import math
from typing import Any

from ...proto.errors import InvalidArgument, not_allowed

NO_GRAD_BYTES = 128 << 20  # default of connect's no_grad_bytes
NO_GRAD_SEC = 10.0  # default of connect's no_grad_sec, unless staleness is 0


def no_grad_arguments(no_grad_bytes: int, no_grad_sec: float | None, staleness: int | None) -> dict[str, Any]:
    """Checks the limits and returns them as keyword arguments of the native session.

    Args:
        no_grad_bytes: the limit for the rows of all tables together, in bytes. When there are more, the rows are
            dropped before the next such lookup.
        no_grad_sec: the age, in seconds, at which a table's rows are dropped. None is ``NO_GRAD_SEC``. At staleness 0
            there is no age limit, as the rows of one clock never change.
        staleness: the staleness of the session.

    Raises:
        InvalidArgument: an argument is out of range; the text names it.
    """
    if not isinstance(no_grad_bytes, int) or not 0 <= no_grad_bytes < 2**63:
        raise not_allowed("connect.no_grad_bytes", no_grad_bytes, "[0, 2**63)")
    if no_grad_sec is not None and staleness == 0:
        raise InvalidArgument("connect.no_grad_sec: it has no effect at staleness 0; allowed: None")
    if no_grad_sec is not None and not 0.001 <= no_grad_sec < math.inf:
        raise not_allowed("connect.no_grad_sec", no_grad_sec, ">= 0.001, or None")
    seconds = NO_GRAD_SEC if no_grad_sec is None else no_grad_sec
    return {"no_grad_bytes": no_grad_bytes, "no_grad_ms": 0 if staleness == 0 else round(1000 * seconds)}
