"""What a manifest is made of: files with their sizes and checksums, tables, workers, jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator

from ..documents import Count, FileName, Int, Text
from ..schema import TableSchema

_NAME = re.compile(r"save-(\d{6,18})")


def number_of(name: str) -> int | None:
    """The number of a checkpoint's folder; None for a name that is none."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def _checkpoint_name(name: str) -> str:
    if number_of(name) is None:
        raise ValueError(f"{name!r} is not allowed; allowed: save- and 6 to 18 digits")
    return name


CheckpointName = Annotated[Text, AfterValidator(_checkpoint_name)]


@dataclass(frozen=True)
class FileFacts:
    """A file of a checkpoint or published model: its name, bytes, and the XXH3-64 of these in hexadecimal digits."""

    file: FileName
    bytes: Count
    xxh3: Text


@dataclass(frozen=True)
class PartEntry(FileFacts):
    """Rows of one table that one shard wrote, all of slots [first_slot, end_slot). The file may have other tables'
    rows too.
    """

    shard: Count
    first_slot: Count
    end_slot: Count
    rows: Count


@dataclass(frozen=True)
class SlotsEntry(FileFacts):
    """What one shard knew of its slots, all of which are in [first_slot, end_slot)."""

    first_slot: Count
    end_slot: Count


@dataclass(frozen=True)
class TableEntry:
    """A table and its rows."""

    schema: TableSchema
    parts: tuple[PartEntry, ...]

    @property
    def rows(self) -> int:
        """How many."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True)
class WorkerEntry(FileFacts):
    """What a worker gave: dense side, optimizers, reader, random numbers."""

    rank: Count
    worker_id: Count
    epoch: Count


@dataclass(frozen=True)
class JobEntry:
    """A job at the cut.

    Attributes:
        step: the last one in the cut, -1 before the first; without staleness 0 the highest of any worker.
        sequences: (worker id, epoch, last sequence in the cut).
        windows: by shard, what each knew of the workers' commits (``install_jobs`` of the native server).
        data: how much of an epoch the rows have, where the coordinator leases data; else {}.
    """

    job_id: Count
    name: Text
    staleness: Count | None
    generation: Count
    step: Int
    sequences: tuple[tuple[Count, Count, Int], ...]
    windows: tuple[dict[str, Any], ...]
    data: dict[str, Any] = field(default_factory=dict)
