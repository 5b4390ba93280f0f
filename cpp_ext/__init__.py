"""The native core: `_server` (stores and shards), `_client` (clients and sessions), `_bench` and the torch ops."""

from __future__ import annotations

import platform
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


class UnsupportedError(ImportError):
    """The native core cannot run here: it was built for another Python, CPU or torch."""


def supported_torches() -> list[str]:
    """Returns the minor versions of torch, such as ``2.13``, that this build has operators for, oldest first."""
    found = [path.stem.partition("-")[2] for path in _FOLDER.glob("libsparserow_ops-*.so")]
    return sorted(found, key=lambda minor: [int(number) for number in minor.split(".")])


def operators_of(torch: str) -> Path:
    """Returns the library of the operators for a torch; a build for CUDA and one without are alike.

    Args:
        torch: the version of the torch that is installed, such as ``2.13.0+cpu``.

    Raises:
        UnsupportedError: this build has no operators for its minor version.
    """
    supported = supported_torches()
    minor = ".".join(torch.split(".")[:2])
    if minor not in supported:
        allowed = ", ".join(f"{each}.*" for each in supported) or "none: run make setup"
        raise UnsupportedError(f"torch {torch} is not supported by this build; supported: {allowed}", name="torch")
    return _FOLDER / f"libsparserow_ops-{minor}.so"


def __getattr__(name: str) -> Any:
    """Says why a module of the core cannot be imported, before Python says that there is none."""
    if name in ("_server", "_client") and not any((_FOLDER / f"{name}{each}").exists() for each in EXTENSION_SUFFIXES):
        built = sorted(path.suffixes[0].removeprefix(".") for path in _FOLDER.glob(f"{name}.*.so"))
        here = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()}"
        raise UnsupportedError(
            f"{here} is not supported by this build; supported: {', '.join(built) or 'none: run make setup'}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
