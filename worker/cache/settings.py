"""``RowCache``: how large a session's row cache is, and how old its rows may be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from ...proto.errors import InvalidArgument

OwnCommits = Literal["exact", "bounded"]


@dataclass(frozen=True)
class RowCache:
    """For :func:`connect`.

    Attributes:
        bytes: of rows with their bookkeeping, over all tables of the session; at most the machine's memory.
        staleness: steps for which a row serves lookups before it is validated (asked about by its version, and sent
            again if it has changed). Part of the session's ``staleness``, so at most that; 0 validates every use, and
            rows are what they are without a cache, to the bit.
        own_commits: "exact": a row that this session changed is validated before its next use, so that it always sees
            its own work. "bounded": it sees its own steps, as others', within ``staleness``.
    """

    bytes: int
    staleness: int = 0
    own_commits: OwnCommits = "exact"


def check_cache(cache: RowCache | None, staleness: int | None, where: str = "connect.cache") -> None:
    """Raises InvalidArgument, naming the field, for a cache that a session of this ``staleness`` cannot have."""
    if cache is None:
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not isinstance(cache.bytes, int) or not 0 < cache.bytes <= memory:
        raise InvalidArgument(
            f"{where}.bytes: {cache.bytes!r} is not allowed; allowed: 1 to {memory}, the memory of this machine"
        )
    if not isinstance(cache.staleness, int) or not 0 <= cache.staleness < 2**31:
        raise InvalidArgument(f"{where}.staleness: {cache.staleness!r} is not allowed; allowed: [0, 2**31)")
    if cache.own_commits not in ("exact", "bounded"):
        raise InvalidArgument(f"{where}.own_commits: {cache.own_commits!r} is not allowed; allowed: exact, bounded")
    if staleness is not None and cache.staleness > staleness:
        raise InvalidArgument(
            f"{where}.staleness: {cache.staleness} is not allowed at staleness {staleness}; allowed: 0 to {staleness}"
        )


def cache_arguments(cache: RowCache | None) -> dict[str, Any]:
    """For the native session."""
    if cache is None:
        return {}
    is_exact = cache.own_commits == "exact"
    return {"cache_bytes": cache.bytes, "cache_staleness": cache.staleness, "cache_exact": is_exact}
