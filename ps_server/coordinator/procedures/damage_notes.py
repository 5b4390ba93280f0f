"""Looks which checkpoints in the folder of the newest one were found damaged, for the status."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from ....proto.checkpoint import manifest as files
from ....proto.checkpoint.folder import Folder
from ....proto.errors import SparserowError
from ..state.cluster import Cluster

_EVERY_SEC = 10.0
_DEADLINE_SEC = 2.0


class DamageNotes:
    """The notes of one folder, which are read again after ten seconds. It belongs to one event loop.

    Args:
        cluster: names the folder.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._url = ""
        self._read_at = -_EVERY_SEC
        self._names: list[str] = []

    async def names(self) -> list[str]:
        """Returns the names of the checkpoints that were found damaged; those known before where a store is slow."""
        if self._cluster.rows_checkpoint is None:
            return []
        url = self._cluster.rows_checkpoint[0]
        now = time.monotonic()
        if url != self._url:
            self._url, self._names = url, []
        elif now - self._read_at < _EVERY_SEC:
            return self._names
        self._read_at = now
        with suppress(SparserowError, OSError, TimeoutError, asyncio.TimeoutError):
            self._names = await asyncio.wait_for(asyncio.to_thread(self._read, url), _DEADLINE_SEC)
        return self._names

    def _read(self, url: str) -> list[str]:
        return sorted(files.damaged_in(Folder(self._cluster.checkpoint_roots.check(url))))
