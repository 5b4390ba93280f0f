"""``RowCache``: how large a session's row cache is, how old its rows may be, and where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed

if TYPE_CHECKING:
    import torch

OwnCommits = Literal["exact", "bounded"]
Storage = Literal["auto", "host", "device"]


@dataclass(frozen=True)
class RowCache:
    """For :func:`connect`.

    Attributes:
        bytes: of rows with their bookkeeping, over all tables of the session; at most the memory of where they are.
        staleness: steps for which a row serves lookups before it is validated (asked about by its version, and sent
            again if it has changed). Part of the session's ``staleness``, so at most that; 0 validates every use, and
            rows are what they are without a cache, to the bit.
        own_commits: "exact": a row that this session changed is validated before its next use, so that it always sees
            its own work. "bounded": it sees its own steps, as others', within ``staleness``.
        storage: "device": rows are in the memory of the model's device, by Triton kernels, which need CUDA. "host": in
            the host's memory. "auto": on the device of a model that is on CUDA when it is distributed, else the host.
    """

    bytes: int
    staleness: int = 0
    own_commits: OwnCommits = "exact"
    storage: Storage = "auto"


def check_cache(cache: RowCache | None, staleness: int | None, where: str = "connect.cache") -> None:
    """Raises InvalidArgument, naming the field, for a cache that a session of this ``staleness`` cannot have."""
    if cache is None:
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not isinstance(cache.bytes, int) or not 0 < cache.bytes <= memory:
        raise not_allowed(f"{where}.bytes", cache.bytes, f"1 to {memory}, the memory of this machine")
    if not isinstance(cache.staleness, int) or not 0 <= cache.staleness < 2**31:
        raise not_allowed(f"{where}.staleness", cache.staleness, "[0, 2**31)")
    if cache.own_commits not in ("exact", "bounded"):
        raise not_allowed(f"{where}.own_commits", cache.own_commits, "exact, bounded")
    if cache.storage not in ("auto", "host", "device"):
        raise not_allowed(f"{where}.storage", cache.storage, "auto, host, device")
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


def storage_on(cache: RowCache, device: torch.device, where: str = "connect.cache") -> Callable[[int, int], Any] | None:
    """What makes the storage of a session whose model is on ``device``; None: the native one, in the host's memory.

    Raises:
        InvalidArgument: ``storage="device"`` where no kernels run, or more bytes than the device has.
        FailedPrecondition: the device needs Triton, which is not installed.
    """
    if cache.storage == "host" or (cache.storage == "auto" and device.type != "cuda"):
        return None
    try:
        from ...cpp_ext.device import device_rows
        from ...cpp_ext.device.device_storage import DeviceStorage, runs_on
    except ImportError as error:
        raise FailedPrecondition(
            f"{where}.storage: rows on {device} need Triton ({error}); install it, or take storage='host'"
        ) from None
    if not runs_on(device):
        raise InvalidArgument(
            f"{where}.storage: 'device' is not allowed for a model on {device}; allowed: auto, host (kernels need CUDA)"
        )
    memory = device_rows.memory_of(device)
    if cache.bytes > memory:
        raise InvalidArgument(
            f"{where}.bytes: {cache.bytes} is not allowed for a model on {device}; allowed: 1 to {memory}, the memory "
            "of the device"
        )
    return lambda capacity_bytes, dim: DeviceStorage(capacity_bytes, dim, device)
