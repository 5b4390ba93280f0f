"""Imports modules of the user's own, which a job file names."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ...proto.errors import InvalidArgument

_NEAREST = 3


def imported(setting: str, module: str) -> ModuleType:
    """Imports a module; the working directory is searched first.

    Args:
        setting: the key of the job file that names the module.
        module: its name.

    Raises:
        InvalidArgument: the module cannot be imported.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except Exception as error:  # the code of a module may raise anything
        raise InvalidArgument(
            f"{setting}: module {module} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def nearest_of(name: str, known: Sequence[str]) -> str:
    """Returns the nearest of the known names, or all of them, as the end of an error text."""
    near: list[Any] = difflib.get_close_matches(name, known, n=_NEAREST)
    if near:
        return f"; nearest: {', '.join(near)}"
    return f"; there are: {', '.join(known)}" if known else ""
