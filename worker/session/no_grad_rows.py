"""How much of what a step's lookups without gradient have read is kept, and for how long."""

from __future__ import annotations

import math
from typing import Any

from ...proto.errors import InvalidArgument, not_allowed

NO_GRAD_BYTES = 128 << 20
NO_GRAD_SEC = 10.0


def no_grad_arguments(no_grad_bytes: int, no_grad_sec: float | None, staleness: int | None) -> dict[str, Any]:
    """Those of the native session.

    Args:
        no_grad_bytes: of all tables; more are dropped before the next such lookup.
        no_grad_sec: a table's rows that are older are dropped; None is ``NO_GRAD_SEC``, and none at staleness 0, where
            rows of one clock are the same at any time.
        staleness: the session's.

    Raises:
        InvalidArgument: names the argument that is out of range.
    """
    if not isinstance(no_grad_bytes, int) or not 0 <= no_grad_bytes < 2**63:
        raise not_allowed("connect.no_grad_bytes", no_grad_bytes, "[0, 2**63)")
    if no_grad_sec is not None and staleness == 0:
        raise InvalidArgument("connect.no_grad_sec: it has no effect at staleness 0; allowed: None")
    if no_grad_sec is not None and not 0.001 <= no_grad_sec < math.inf:
        raise not_allowed("connect.no_grad_sec", no_grad_sec, ">= 0.001, or None")
    seconds = NO_GRAD_SEC if no_grad_sec is None else no_grad_sec
    return {"no_grad_bytes": no_grad_bytes, "no_grad_ms": 0 if staleness == 0 else round(1000 * seconds)}
