"""Which checkpoint has the rows of a table that was restored by itself, or with its namespace. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RowSource:
    """The rows that a table was restored from.

    Attributes:
        url, name: the folder of checkpoints, and the checkpoint.
        saved_table_id: the id of the table there.
        changed: of dim, dtype and optimizer, what the table had otherwise than the checkpoint.
    """

    url: str
    name: str
    saved_table_id: int
    changed: tuple[str, ...] = ()


def to_document(sources: Mapping[int, RowSource]) -> list[Any]:
    """Returns the saved form, in which a checkpoint is named once for all of its tables."""
    grouped: dict[tuple[str, str], list[Any]] = {}
    for table_id, source in sources.items():
        tables = grouped.setdefault((source.url, source.name), [])
        tables.append([table_id, source.saved_table_id, list(source.changed)])
    return [[url, name, tables] for (url, name), tables in grouped.items()]


def of_document(saved: list[Any]) -> dict[int, RowSource]:
    """Returns the sources of a saved form."""
    return {
        table_id: RowSource(url, name, saved_table_id, tuple(changed))
        for url, name, tables in saved
        for table_id, saved_table_id, changed in tables
    }
