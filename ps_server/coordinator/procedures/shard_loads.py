"""Lets the shards verify the files of a checkpoint, and load their slots from it, for a restore."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ....proto import control_pb2 as pb
from ....proto.errors import DeadlineExceeded, Unavailable
from ..state.cluster import Cluster
from ..state.shards import Shard, ShardPhase
from .shard_calls import ShardCalls, all_of

log = logging.getLogger(__name__)

_SHARD_DEADLINE_SEC = 60.0  # beyond the lease: time for a new process to replace an ended one
_MOST_TRIES = 4  # attempts of one shard
_LOOK_SEC = 0.05
_PAUSE_SEC = 0.5  # before a shard that failed is asked again


@dataclass(frozen=True)
class Loaded:
    """The reply of a shard to its load.

    Attributes:
        instance: the process of the shard that has loaded.
        reply: its reply.
    """

    instance: int
    reply: pb.LoadReply


class ShardLoads:
    """The loads of one restore. It belongs to one event loop.

    Args:
        cluster: the cluster whose shards load.
        shard_calls: the connections to the shards.
        request: the request for every shard, without its lineage.
        may_begin_anew: whether a process without rows may replace a process that ends. Otherwise the end of a process
            fails the restore.

    Attributes:
        has_begun: whether a shard may have emptied a table.
    """

    def __init__(
        self,
        cluster: Cluster,
        shard_calls: ShardCalls,
        request: pb.LoadRequest,
        *,
        may_begin_anew: bool,
    ) -> None:
        self.has_begun = False
        self._cluster = cluster
        self._shard_calls = shard_calls
        self._request = request
        self._may_begin_anew = may_begin_anew
        self._loaded: dict[int, Loaded] = {}  # by index of the shard

    async def verify(self) -> None:
        """Lets the shards read every file once and compare it with the manifest; no table is touched.

        Raises:
            DataLoss: a file is missing or damaged; the text names it.
            SparserowError: a shard cannot be reached.
        """
        shards = self._cluster.shards.shards
        await all_of(self._stream(shard, self._to_verify(shard.index, len(shards))) for shard in shards)

    def _to_verify(self, turn: int, turns: int) -> pb.LoadRequest:
        request = pb.LoadRequest()
        request.CopyFrom(self._request)
        request.verify_only, request.turn, request.turns = True, turn, turns
        return request

    async def load(self, windows_json: str) -> None:
        """Lets every shard empty its tables and load them; when a process ends, the next process of the shard begins
        again.

        Args:
            windows_json: the commit windows of the restored jobs, for every shard.

        Raises:
            DataLoss: a file is missing or damaged; the text names it.
            SparserowError: a shard has no room, or no process replaces one that ended.
        """
        self.has_begun = True
        self._request.windows_json = windows_json
        while pending := list(self._without_rows()):
            await all_of(self._load_shard(shard) for shard in pending)

    def check_loaded(self) -> None:
        """Raises Unavailable when a process that has loaded its rows no longer has the shard."""
        for shard in self._without_rows():
            raise Unavailable(
                f"shard {shard.index} ended after it had loaded its rows, and another process has "
                f"replaced it; restore again"
            )

    @property
    def rows(self) -> int:
        """The number of loaded rows on all shards."""
        return sum(loaded.reply.rows for loaded in self._loaded.values())

    def _without_rows(self) -> Iterable[Shard]:
        for shard in self._cluster.shards.shards:
            loaded = self._loaded.get(shard.index)
            if loaded is None or loaded.instance != shard.instance:
                yield shard

    async def _load_shard(self, shard: Shard) -> None:
        tries = 0
        while True:
            instance = shard.instance
            try:
                self._loaded[shard.index] = Loaded(instance, await self._stream(shard, self._request_of(shard)))
                return
            except (Unavailable, DeadlineExceeded) as error:
                tries += 1
                if not self._may_begin_anew or tries == _MOST_TRIES:
                    raise
                log.warning("shard %d loads again once it serves: %s", shard.index, error)
            await asyncio.sleep(_PAUSE_SEC)
            await self.until_serving(shard)

    async def until_serving(self, shard: Shard) -> None:
        """Returns when a shard serves, so that it has the whole state.

        Raises:
            Unavailable: the shard did not serve in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._cluster.shards.lease_sec + _SHARD_DEADLINE_SEC
        while shard.phase is not ShardPhase.SERVING:
            if loop.time() > deadline:
                raise Unavailable(f"shard {shard.index} ended, and no process has replaced it")
            await asyncio.sleep(_LOOK_SEC)

    async def _stream(self, shard: Shard, request: pb.LoadRequest) -> pb.LoadReply:
        last = pb.LoadReply()
        async for reply in self._shard_calls.stream(shard, "Load", request):
            last = reply
        return last

    def _request_of(self, shard: Shard) -> pb.LoadRequest:
        request = pb.LoadRequest()
        request.CopyFrom(self._request)
        request.lineage = shard.lineage
        return request
