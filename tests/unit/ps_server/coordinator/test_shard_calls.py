"""A coordinator and shards of the build before: tables one at a time, and no save that would lack their rows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.errors import FailedPrecondition
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.proto.shard_protocol import SHARD_PROTOCOL
from sparserow.ps_server.coordinator.procedures.shard_calls import ShardCalls, check_knows_quorum
from sparserow.ps_server.coordinator.state.cluster import Cluster, ClusterOptions

TABLES = 3


class Link:
    """A connection that notes what it is told; ``protocol`` is what the shard says of itself."""

    instance = 9

    def __init__(self, protocol: int) -> None:
        self.lock = asyncio.Lock()
        self.protocol = protocol
        self.calls: list[tuple[str, Any]] = []

    async def call(self, method: str, request: Any, **_: Any) -> Any:
        self.calls.append((method, request))
        return pb.ShardStatsReply(protocol=self.protocol) if method == "Stats" else pb.CutReply()

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("protocol", [0, 2, SHARD_PROTOCOL])
def test_a_quorum_needs_shards_that_know_it(protocol: int) -> None:
    cluster = Cluster.create(ClusterOptions(shards=1, slot_count=64))
    cluster.shards.shards[0].protocol = protocol
    if protocol in (0, SHARD_PROTOCOL):  # 0: it has not been asked yet
        check_knows_quorum(cluster.shards.shards)
        return
    with pytest.raises(FailedPrecondition, match="quorum: shard 0 runs an earlier build, which knows no quorum"):
        check_knows_quorum(cluster.shards.shards)


@pytest.mark.parametrize("protocol", [0, SHARD_PROTOCOL])
def test_a_shard_is_told_as_its_build_understands(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        cluster = Cluster.create(ClusterOptions(shards=1, slot_count=64))
        for number in range(TABLES):
            cluster.registry.admit(TableSchema("ads", f"t{number}", 4, SGD()))
        shard = cluster.shards.register(0, instance=9, control=("127.0.0.1", 1), pid=1, tables=0, now=0.0)
        shard.data = ("127.0.0.1", 2)
        shard_calls, link = ShardCalls(cluster), Link(protocol)

        async def to(_: Any) -> Link:
            return link

        monkeypatch.setattr(shard_calls, "_link", to)
        await shard_calls.catch_up(shard)
        made = [len(request.schemas) for method, request in link.calls if method == "CreateTable"]
        assert made == ([TABLES] if protocol else [1] * TABLES)
        if protocol:
            assert len(await shard_calls.cut(pb.CutRequest(deadline_ms=1000))) == 1
            return
        with pytest.raises(FailedPrecondition, match="shard 0 runs an earlier build, whose checkpoints have another"):
            await shard_calls.cut(pb.CutRequest(deadline_ms=1000))
        for method in ("Dump", "Load"):
            with pytest.raises(FailedPrecondition, match="earlier build"):
                await anext(shard_calls.stream(shard, method, pb.LoadRequest()))
        assert not {"Cut", "Dump", "Load"} & {method for method, _ in link.calls}

    asyncio.run(scene())
