"""The entries of a manifest: files with their sizes and checksums, tables, workers and jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator

from ..documents import Count, FileName, Int, Text
from ..schema import TableSchema

_NAME = re.compile(r"save-(\d{6,18})")


def number_of(name: str) -> int | None:
    """Returns the number of a checkpoint's folder; None when ``name`` is not the name of a checkpoint."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def _checkpoint_name(name: str) -> str:
    if number_of(name) is None:
        raise ValueError(f"{name!r} is not allowed; allowed: save- and 6 to 18 digits")
    return name


CheckpointName = Annotated[Text, AfterValidator(_checkpoint_name)]


@dataclass(frozen=True)
class FileFacts:
    """A file of a checkpoint or published model: its name, its size in bytes, and its XXH3-64 in hexadecimal digits."""

    file: FileName
    bytes: Count
    xxh3: Text


@dataclass(frozen=True)
class PartEntry(FileFacts):
    """Rows of one table that one shard wrote, all in slots [first_slot, end_slot).

    The file may also have rows of other tables.
    """

    shard: Count
    first_slot: Count
    end_slot: Count
    rows: Count


@dataclass(frozen=True)
class SlotsEntry(FileFacts):
    """A file in which one shard wrote the state of its slots, all of which are in [first_slot, end_slot)."""

    first_slot: Count
    end_slot: Count


@dataclass(frozen=True)
class TableEntry:
    """A table and the parts that hold its rows."""

    schema: TableSchema
    parts: tuple[PartEntry, ...]

    @property
    def rows(self) -> int:
        """The number of rows in all parts."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True)
class WorkerEntry(FileFacts):
    """A file with the state of one worker: dense tower, optimizers, reader and random state."""

    rank: Count
    worker_id: Count
    epoch: Count


@dataclass(frozen=True)
class JobEntry:
    """The state of a job at the cut.

    Attributes:
        step: the last step in the cut, -1 before the first; unless staleness is 0, the highest step of any worker.
        sequences: (worker id, epoch, last sequence in the cut) of each worker.
        windows: the commits of the workers that each shard knew (``install_jobs`` of the native server), by shard.
        data: the progress of the epoch that the rows contain, where the coordinator leases data; {} otherwise.
    """

    job_id: Count
    name: Text
    staleness: Count | None
    generation: Count
    step: Int
    sequences: tuple[tuple[Count, Count, Int], ...]
    windows: tuple[dict[str, Any], ...]
    data: dict[str, Any] = field(default_factory=dict)
