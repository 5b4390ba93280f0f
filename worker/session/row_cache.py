"""``RowCache``: the size of a session's row cache, and the age that its rows may have."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from ...proto.errors import not_allowed
from ...proto.schema import DTYPES, Dtype

OwnCommits = Literal["exact", "bounded"]


@dataclass(frozen=True)
class RowCache:
    """The settings of a session's row cache, for :func:`connect`.

    Attributes:
        bytes: the capacity for the rows of all tables, bookkeeping included, in bytes; at most the memory of the host.
        staleness: the number of steps for which a row serves lookups before it is validated. To validate a row, the
            session asks the shards by the row's version, and they send the row again if it has changed. The value is a
            part of the session's ``staleness``, and at most equal to it. 0 validates every use; rows are then
            bit-identical to those without a cache.
        own_commits: "exact": a row that this session changed is validated before its next use, so the session always
            sees its own steps. "bounded": the session sees its own steps within ``staleness``, like those of others.
        dtype: the dtype in which rows are kept: "float32", "bfloat16" or "float16". With 16 bits a row is rounded when
            it is kept, so that as many bytes hold about twice the rows; they need a ``staleness`` of at least 1, as 0
            promises the bits of the shards. The shards' rows are not rounded.
    """

    bytes: int
    staleness: int = 0
    own_commits: OwnCommits = "exact"
    dtype: Dtype = "float32"


def check_cache(cache: RowCache | None, staleness: int | None, where: str = "connect.cache") -> None:
    """Checks the settings of a row cache against the session's staleness.

    Args:
        cache: the settings; None: there is no cache, and nothing to check.
        staleness: the session's staleness; None: no clock.
        where: the name of the settings in error texts.

    Raises:
        InvalidArgument: a field is out of range; the text names it.
    """
    if cache is None:
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not isinstance(cache.bytes, int) or not 0 < cache.bytes <= memory:
        raise not_allowed(f"{where}.bytes", cache.bytes, f"1 to {memory}, the memory of this machine")
    if not isinstance(cache.staleness, int) or not 0 <= cache.staleness < 2**31:
        raise not_allowed(f"{where}.staleness", cache.staleness, "[0, 2**31)")
    if cache.own_commits not in ("exact", "bounded"):
        raise not_allowed(f"{where}.own_commits", cache.own_commits, "exact, bounded")
    if cache.dtype not in DTYPES:
        raise not_allowed(f"{where}.dtype", cache.dtype, DTYPES)
    if cache.dtype != "float32" and cache.staleness == 0:
        raise not_allowed(f"{where}.dtype", cache.dtype, "float32 with staleness 0, which gives the shards' bits")
    if staleness is not None and cache.staleness > staleness:
        raise not_allowed(f"{where}.staleness", cache.staleness, f"0 to {staleness}, the session's staleness")


def cache_arguments(cache: RowCache | None) -> dict[str, Any]:
    """Returns the settings as keyword arguments of the native session."""
    if cache is None:
        return {}
    is_exact = cache.own_commits == "exact"
    return {
        "cache_bytes": cache.bytes,
        "cache_staleness": cache.staleness,
        "cache_exact": is_exact,
        "cache_dtype": cache.dtype,
    }
