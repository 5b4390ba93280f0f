"""Columns that paths give, as Hive writes them: ``day=2024-01-05/country=DE/part.parquet``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")


def _texts(path: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in path.partition("://")[2].split("/")[:-1] if "://" in path else path.split("/")[:-1]:
        name, is_pair, value = folder.partition("=")
        if is_pair and name:
            found[unquote(name)] = None if value == _NULL else unquote(value)
    return found


class Partitions:
    """The columns of partitions, with the type of each over all files.

    A column is int64 where all its values are integers as one writes them, so that the key of its text is the same
    either way; otherwise it is text.

    Args:
        paths: the paths of all files.

    Attributes:
        text_columns: the names of the columns that are text.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._texts = {path: _texts(path) for path in paths}
        others = {
            name
            for texts in self._texts.values()
            for name, text in texts.items()
            if text is not None and not _INTEGER.fullmatch(text)
        }
        self.text_columns = frozenset(others)

    def of(self, path: str) -> Mapping[str, Any]:
        """Returns the columns that a path gives, as Arrow scalars by name."""
        texts = self._texts.get(path)
        if texts is None:
            texts = _texts(path)
        return {name: self._scalar(name, text) for name, text in texts.items()}

    def _scalar(self, name: str, text: str | None) -> Any:
        if name in self.text_columns:
            return pa.scalar(text, pa.string())
        return pa.scalar(None if text is None else int(text), pa.int64())
