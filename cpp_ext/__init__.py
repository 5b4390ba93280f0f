"""The native core: `_server` (stores and shards), `_client` (clients and sessions), `_bench` and the torch ops."""

from __future__ import annotations

import platform
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any


class UnsupportedError(ImportError):
    """The native core cannot run here: it was built for another Python, CPU or torch."""


def check_torch(found: str, built_for: str) -> None:
    """Refuses a torch that the operators were not compiled for; a build for CUDA and one without are alike.

    Args:
        found: the version of the torch that is installed, such as ``2.13.0+cpu``.
        built_for: the version that the operators were compiled for.

    Raises:
        UnsupportedError: the versions differ in their first two numbers.
    """
    minor = ".".join(built_for.split(".")[:2])
    if found.split(".")[:2] != built_for.split(".")[:2]:
        raise UnsupportedError(f"torch {found} is not supported by this build; supported: {minor}.*", name="torch")


def __getattr__(name: str) -> Any:
    """Says why a module of the core cannot be imported, before Python says that there is none."""
    folder = Path(__file__).parent
    if name in ("_server", "_client") and not any((folder / f"{name}{each}").exists() for each in EXTENSION_SUFFIXES):
        built = sorted(path.suffixes[0].removeprefix(".") for path in folder.glob(f"{name}.*.so"))
        here = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()}"
        raise UnsupportedError(
            f"{here} is not supported by this build; supported: {', '.join(built) or 'none: run make setup'}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
