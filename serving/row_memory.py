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
        ssd_engine: the storage of rows there, ``pages`` or ``rocksdb``; None: ``pages``.
        ssd_direct_io: whether ``pages`` reads and writes there past the system's cache.

    Raises:
        InvalidArgument: ``ssd_path`` is given without a budget of at least 16 MiB, or it is not a folder; or
            ``ssd_engine`` is another word, or is given without ``ssd_path``; or ``ssd_direct_io`` is given without
            ``ssd_path`` or with ``rocksdb``.
        FailedPrecondition: ``ssd_engine`` is ``rocksdb``, but this build has no RocksDB.
    """

    budget_bytes: int = 0
    ssd_path: str | None = None
    ssd_engine: str | None = None
    ssd_direct_io: bool = False

    def __post_init__(self) -> None:
        if self.ssd_engine is not None:
            if self.ssd_path is None:
                raise InvalidArgument("--ssd-engine: it has no effect without --ssd-path")
            if self.ssd_engine not in ("pages", "rocksdb"):
                raise InvalidArgument(f"--ssd-engine: {self.ssd_engine} is not allowed; allowed: pages, rocksdb")
        if self.ssd_direct_io and self.ssd_path is None:
            raise InvalidArgument("--ssd-direct-io: it has no effect without --ssd-path")
        if self.ssd_direct_io and self.ssd_engine == "rocksdb":
            raise InvalidArgument("--ssd-direct-io: it is not allowed with --ssd-engine rocksdb; allowed: pages")
        if self.ssd_path is None:
            return
        if self.budget_bytes < LEAST_TIERED_BYTES:
            raise InvalidArgument("--ssd-path: it needs --memory-budget of at least 16MiB for the rows in memory")
        if not Path(self.ssd_path).is_dir():
            raise InvalidArgument(f"--ssd-path: {self.ssd_path} is no folder; make it on the disk for the rows")
        if self.ssd_engine == "rocksdb" and not _server.has_rocksdb():
            raise FailedPrecondition("--ssd-engine: this build has no RocksDB; take pages")

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
            ssd_engine=self.ssd_engine or "pages",
            ssd_direct_io=self.ssd_direct_io,
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
