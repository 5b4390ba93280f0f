"""The storage for rows of a serving process: memory, and an SSD for the rows that have no room there."""

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
    """The storage that each version may use.

    Args:
        budget_bytes: the memory budget for rows and indexes, in bytes; 0: no budget.
        ssd_path: the folder for the rows that exceed the budget; None: rows must not exceed it.

    Raises:
        InvalidArgument: ``ssd_path`` is given without a budget of at least 16 MiB, or it is not a folder.
        FailedPrecondition: ``ssd_path`` is given, but this build has no SSD tier.
    """

    budget_bytes: int = 0
    ssd_path: str | None = None

    def __post_init__(self) -> None:
        if self.ssd_path is None:
            return
        if self.budget_bytes < LEAST_TIERED_BYTES:
            raise InvalidArgument("--ssd-path: it needs --memory-budget of at least 16MiB for the rows in memory")
        if not Path(self.ssd_path).is_dir():
            raise InvalidArgument(f"--ssd-path: {self.ssd_path} is no folder; make it on the disk for the rows")
        if not _server.has_ssd_tier():
            raise FailedPrecondition("--ssd-path: this build has no SSD tier; build it with RocksDB")

    def make_store(self, slot_count: int, cluster_id: int, place: ShardAssignment, name: str) -> _server.Store:
        """Makes an empty store; with an SSD it has a folder of its own, which is emptied.

        Args:
            slot_count: the number of slots of the cluster that trained the rows.
            cluster_id: the id of that cluster.
            place: the shard and replica of this process.
            name: the name of the version, for the folder.
        """
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
        """Removes folders of this shard and replica that no store uses any more.

        They belong to versions that were unloaded, or to a process that was killed.
        """
        if self.ssd_path is None or not self._folder(place).is_dir():
            return
        for folder in self._folder(place).iterdir():
            if not _is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, place: ShardAssignment) -> Path:
        assert self.ssd_path is not None
        return Path(self.ssd_path) / f"serving-{place.shard}-{place.shards}-{place.replica}"


def _is_in_use(folder: Path) -> bool:
    """Returns whether a store of some process holds the lock of the folder (cpp_ext/store/ssd/ssd_folder.h)."""
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
