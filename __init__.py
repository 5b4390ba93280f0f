"""Sparserow: a parameter server for sparse recommendation models, native to PyTorch.

Names are imported when they are first used, so ``import sparserow`` is cheap and a server never loads torch.
``__init__.pyi`` lists the names once, for this module and for type checkers.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_MODULES = {
    alias.name: f".{statement.module}"
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    owner = importlib.import_module(module, __name__)
    value = getattr(owner, name, None)
    if value is None:  # a public module, such as sr.models
        value = importlib.import_module(f"{module}.{name}", __name__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
