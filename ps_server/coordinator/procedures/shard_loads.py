"""What a restore asks of the shards: to read a checkpoint's files and compare them, and to load their slots of it."""

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

_SHARD_DEADLINE_SEC = 60.0  # for a process to take the place of one that ended, beyond its lease
_MOST_TRIES = 4  # of one shard
_LOOK_SEC = 0.05
_PAUSE_SEC = 0.5  # before a process that refused is asked again


@dataclass(frozen=True)
class Loaded:
    """What a shard has loaded, and which process of it."""

    instance: int
    reply: pb.LoadReply


class ShardLoads:
    """The loads of one restore. Belongs to one event loop.

    Args:
        cluster: whose shards load.
        shard_calls: reaches them.
        request: for every shard, but for its lineage.
        may_begin_anew: a process without rows may take the place of one that ends; else its end is the restore's.
    """

    def __init__(
        self,
        cluster: Cluster,
        shard_calls: ShardCalls,
        request: pb.LoadRequest,
        *,
        may_begin_anew: bool,
    ) -> None:
        self._cluster = cluster
        self._shard_calls = shard_calls
        self._request = request
        self._may_begin_anew = may_begin_anew
        self._loaded: dict[int, Loaded] = {}  # by shard

    async def verify(self) -> None:
        """Every file is read by one shard, and compared with what the manifest says; no table is touched.

        Raises:
            DataLoss: a file is missing or damaged (names it).
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
        """Every shard empties its tables and loads them; one whose process ends begins anew with the next process.

        Args:
            windows_json: of the jobs that go back, for every shard.

        Raises:
            DataLoss: a file is missing or damaged (names it).
            SparserowError: a shard has no room, or nothing takes the place of one that ended.
        """
        self._request.windows_json = windows_json
        while pending := list(self._without_rows()):
            await all_of(self._load_shard(shard) for shard in pending)

    def check_loaded(self) -> None:
        """Raises Unavailable when a process that has loaded its rows is no longer the shard's."""
        for shard in self._without_rows():
            raise Unavailable(f"shard {shard.index} ended when it had its rows, and another process took its place")

    @property
    def rows(self) -> int:
        """On all shards."""
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
                log.warning("shard %d begins its load anew when it serves again: %s", shard.index, error)
            await asyncio.sleep(_PAUSE_SEC)
            await self.until_serving(shard)

    async def until_serving(self, shard: Shard) -> None:
        """Returns when a shard has been told everything.

        Raises:
            Unavailable: it was not, in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._cluster.shards.lease_sec + _SHARD_DEADLINE_SEC
        while shard.phase is not ShardPhase.SERVING:
            if loop.time() > deadline:
                raise Unavailable(f"shard {shard.index} ended, and no process has taken its place")
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
