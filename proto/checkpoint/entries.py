"""What a manifest is made of: files with their sizes and checksums, tables, workers, jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..schema import TableSchema


@dataclass(frozen=True)
class FileFacts:
    """A file of a checkpoint or published model: its name, bytes, and the XXH3-64 of these in hexadecimal digits."""

    file: str
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class PartEntry(FileFacts):
    """Rows of one table that one shard wrote, all of slots [first_slot, end_slot). The file may have other tables'
    rows too.
    """

    shard: int
    first_slot: int
    end_slot: int
    rows: int


@dataclass(frozen=True)
class SlotsEntry(FileFacts):
    """What one shard knew of its slots, all of which are in [first_slot, end_slot)."""

    first_slot: int
    end_slot: int


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

    rank: int
    worker_id: int
    epoch: int


@dataclass(frozen=True)
class JobEntry:
    """A job at the cut.

    Attributes:
        step: the last one in the cut, -1 before the first; without staleness 0 the highest of any worker.
        sequences: (worker id, epoch, last sequence in the cut).
        windows: by shard, what each knew of the workers' commits (``install_jobs`` of the native server).
        data: how much of an epoch the rows have, where the coordinator leases data; else {}.
    """

    job_id: int
    name: str
    staleness: int | None
    generation: int
    step: int
    sequences: tuple[tuple[int, int, int], ...]
    windows: tuple[dict[str, Any], ...]
    data: dict[str, Any] = field(default_factory=dict)
