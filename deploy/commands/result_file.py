"""The files behind ``--json`` and ``--trace``."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ...proto.errors import InvalidArgument


def check_result_file(path: Path | None, option: str = "--json") -> None:
    """Refuses a file that could not be written, before the work begins.

    Args:
        path: None is right.
        option: that names it.

    Raises:
        InvalidArgument: its folder is absent or not writable, or it is a folder itself.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidArgument(f"{option} {path}: cannot be written; allowed: a file in a folder that exists")


def write_result(path: Path | None, values: dict[str, Any]) -> None:
    """Writes ``values`` as JSON; a number that JSON has not (NaN) becomes null. Nothing happens without a path."""
    if path is not None:
        path.write_text(json.dumps(_finite(values), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
