"""Where a serving process keeps rows: in memory, and what has no room there on an SSD."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..cpp_ext import _server
from ..proto.errors import FailedPrecondition, InvalidArgument
from .client.shard_assignment import ShardAssignment

LEAST_TIERED_BYTES = 16 << 20
_UNSAFE = re.compile(r"[^A-Za-z0-9_.@-]")


@dataclass(frozen=True)
class RowMemory:
    """Room for rows, of each version.

    Args:
        budget_bytes: of rows and indexes in memory; 0: no budget.
        ssd_path: folder for the rows beyond it; None: none may be.

    Raises:
        InvalidArgument: a folder without a budget of at least 16 MiB, or that is none.
    """

    budget_bytes: int = 0
    ssd_path: str | None = None

    def __post_init__(self) -> None:
        if self.ssd_path is None:
            return
        if self.budget_bytes < LEAST_TIERED_BYTES:
            raise InvalidArgument("--ssd-path: needs --memory-budget of at least 16MiB: what stays in memory")
        if not Path(self.ssd_path).is_dir():
            raise InvalidArgument(f"--ssd-path: {self.ssd_path} is no folder; make it on the disk for the rows")
        if not _server.has_ssd_tier():
            raise FailedPrecondition("--ssd-path: this build has no SSD tier; build it with RocksDB")

    def make_store(self, slot_count: int, cluster_id: int, place: ShardAssignment, name: str) -> _server.Store:
        """An empty store for what ``name`` says; its folder is its own, and is emptied."""
        if self.ssd_path is None:
            return _server.Store(memory_budget_bytes=self.budget_bytes, slot_count=slot_count)
        folder = self._folder(place) / f"{_UNSAFE.sub('_', name)}-{cluster_id:016x}"
        folder.mkdir(parents=True, exist_ok=True)
        return _server.Store(
            memory_budget_bytes=self.budget_bytes,
            slot_count=slot_count,
            ssd_path=str(folder),
            cluster_id=cluster_id,
            shard=place.shard,
        )

    def remove_unused(self, place: ShardAssignment) -> None:
        """Removes the folders of this place whose stores are gone: of versions that were given up, and of a process
        that was killed."""
        if self.ssd_path is None or not self._folder(place).is_dir():
            return
        for folder in self._folder(place).iterdir():
            if not _is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, place: ShardAssignment) -> Path:
        assert self.ssd_path is not None
        return Path(self.ssd_path) / f"serving-{place.shard}-{place.shards}-{place.replica}"


def _is_in_use(folder: Path) -> bool:
    """Whether a store of some process holds its lock (cpp_ext/store/ssd/ssd_folder.h)."""
    try:
        lock = os.open(folder / "LOCK", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
