"""What ``sparserow --version`` prints."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version


def version_lines(build: Mapping[str, str], torches: Sequence[str], torch: str | None) -> list[str]:
    """Returns a line each for the version, the core, torch, RocksDB and OpenSSL.

    Args:
        build: the facts of the native core.
        torches: the minor versions of torch that there are operators for.
        torch: the version of the torch that is installed; None where there is none.
    """
    found = f"{torch} is installed" if torch else "none is installed, and servers need none"
    return [
        f"sparserow {version('sparserow')}",
        f"core: {platform.machine()}, {build['compiler']}, kernels for {build['kernels']} on this CPU",
        f"torch: built for {', '.join(torches)}; {found}",
        f"RocksDB: {build['rocksdb'] or 'none in this build'}",
        f"OpenSSL: {build['openssl']}",
    ]


def installed_torch() -> str | None:
    """Returns the version of the torch that is installed, without importing it; None where there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
