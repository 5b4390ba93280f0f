"""One save of a cluster: who takes part in it, what it holds, and how far it has come."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ....proto.checkpoint import manifest as files
from ....proto.checkpoint.folder import Folder
from ....proto.errors import SparserowError
from .save_base import Base


class SavePhase(Enum):
    """The phase of a save; the values are those of ``SavePhase`` in control.proto."""

    GATHERING = 0
    CUTTING = 1
    WRITING = 2
    SAVED = 3
    FAILED = 4


Caller = tuple[int, int, int]  # (job id, worker id, epoch)


@dataclass
class Save:
    """One save, from its first caller to its manifest."""

    folder: Folder
    name: str
    job_id: int
    attempt: int = 0  # of the job; 0: of a save without a job
    begun: set[Caller] = field(default_factory=set)
    entered: dict[Caller, files.WorkerEntry | None] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    keep: int = 0
    full_every: int = 1
    base: Base | None = None  # the checkpoint whose changes it saves; None: it saves all rows
    data: dict[int, dict[str, Any]] = field(default_factory=dict)  # by job id: the progress of leased data
    side_budget_bytes: int = 0
    phase: SavePhase = SavePhase.GATHERING
    problem: SparserowError | None = None
    rows: int = 0
    bytes: int = 0
    step: int = -1
    mark: int = 0  # the number of the newest operation on a job when it was cut
    key: str = field(default_factory=lambda: secrets.token_hex(8))  # identifies the save to the shards
    is_cut: asyncio.Event = field(default_factory=asyncio.Event)  # also set when the save has failed
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
