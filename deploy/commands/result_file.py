"""Writes the files of the options ``--json`` and ``--trace``."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ...proto.errors import InvalidArgument
from ...proto.process.whole_file import write_whole


def check_result_file(path: Path | None, option: str = "--json") -> None:
    """Refuses a file that could not be written, before the work begins.

    Args:
        path: the file; None is allowed.
        option: the option that names the file, for the error message.

    Raises:
        InvalidArgument: the folder of the file is absent or not writable, or the path is a folder.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidArgument(
            f"{option} {path}: the file cannot be written; allowed: a file in a folder that exists and can be written"
        )


def write_result(path: Path | None, values: dict[str, Any]) -> None:
    """Writes ``values`` as JSON, with null for NaN and infinities; without a path it does nothing.

    Raises:
        ResourceExhausted: the file cannot be written; one that was there stays.
    """
    if path is not None:
        write_whole(path, json.dumps(_finite(values), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
