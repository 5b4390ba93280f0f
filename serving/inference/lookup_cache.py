"""The options of a cache of rows beside a served model."""

from __future__ import annotations

from dataclasses import dataclass

from ...proto.arguments import check_integer


@dataclass(frozen=True)
class LookupCache:
    """The options of a cache of rows in this process, or on the device of a served model.

    Args:
        capacity_bytes: the capacity for the rows of all tables, in bytes; on a device its directory included.
        ttl_ms: how long a row is used after it was requested, in milliseconds. A cached row is at most this much older
            than the served row.

    Raises:
        InvalidArgument: a value is not an integer of at least 1.
    """

    capacity_bytes: int
    ttl_ms: int = 1000

    def __post_init__(self) -> None:
        check_integer("LookupCache.capacity_bytes", self.capacity_bytes, 1)
        check_integer("LookupCache.ttl_ms", self.ttl_ms, 1)
