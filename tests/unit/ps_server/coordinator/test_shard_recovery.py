"""A shard that comes back alone: what it takes to serve again, whoever holds its place by then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint_rows import checkpoint_without_rows
from sparserow.proto import control_pb2 as pb
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import DataLoss, Unavailable
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.ps_server.coordinator.procedures.shard_calls import ShardCalls
from sparserow.ps_server.coordinator.procedures.shard_recovery import ShardRecoveries
from sparserow.ps_server.coordinator.procedures.turn_lock import TurnLock
from sparserow.ps_server.coordinator.state.cluster import Cluster, ClusterOptions
from sparserow.ps_server.coordinator.state.shards import Shard

DEADLINE_SEC = 120.0


class FakeFleet:
    """Loads as told, and notes who was let in."""

    def __init__(self, cluster: Cluster) -> None:
        self.of = ShardCalls(cluster)
        self.loads: list[int] = []
        self.let_in: list[int] = []
        self.may_end = asyncio.Event()
        self.problem: Exception | None = None
        self.request_bytes = 0

    def route_message(self) -> pb.Route:
        return self.of.route_message()

    async def stream(self, shard: Shard, _method: str, request: pb.LoadRequest) -> AsyncIterator[pb.LoadReply]:
        self.loads.append(shard.instance)
        self.request_bytes = request.ByteSize()
        await self.may_end.wait()
        if self.problem is not None:
            raise self.problem
        yield pb.LoadReply(rows=1)

    async def catch_up(self, shard: Shard) -> None:
        self.let_in.append(shard.instance)


def registered(cluster: Cluster, instance: int, now: float) -> Shard:
    return cluster.shards.register(
        0, instance=instance, control=("127.0.0.1", 1), pid=instance, tables=1, now=now, problem=""
    )


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = Cluster.create(ClusterOptions(shards=1, slot_count=64))
    schema, _ = made.registry.admit(TableSchema("ads", "user", 8, SGD()))
    folder = Folder(str(tmp_path))
    manifest = checkpoint_without_rows(folder, made.cluster_id, schema, 64)
    made.has_rows_in(folder.url, manifest)
    registered(made, 1, 0.0)
    made.shards.leave(0, 1)
    return made


async def until(done: Any) -> None:
    async def look() -> None:
        while not done():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(look(), DEADLINE_SEC)


def test_a_process_without_rows_is_not_let_in_for_the_one_that_got_them(cluster: Cluster) -> None:
    async def scene() -> None:
        shard_calls, saves = FakeFleet(cluster), []
        recoveries = ShardRecoveries(cluster, shard_calls, TurnLock(), lambda: saves.append(1))  # type: ignore[arg-type]
        shard = registered(cluster, 2, 0.0)
        assert shard.restoring
        recoveries.begin(shard)
        await until(lambda: shard_calls.loads == [2])
        cluster.shards.leave(0, 2)  # as when its lease ends: it was stopped, and goes on later
        recoveries.begin(registered(cluster, 3, 1.0))
        shard_calls.may_end.set()
        await until(lambda: shard_calls.let_in)
        assert (shard_calls.loads, shard_calls.let_in) == ([2, 3], [3])
        assert (shard.restoring, shard.restores) == (False, 1)
        await recoveries.close()

    asyncio.run(scene())


def test_what_went_wrong_is_forgotten_when_it_went_well(cluster: Cluster) -> None:
    async def scene() -> None:
        shard_calls = FakeFleet(cluster)
        shard_calls.may_end.set()
        recoveries = ShardRecoveries(cluster, shard_calls, TurnLock(), lambda: None)  # type: ignore[arg-type]
        shard = registered(cluster, 2, 0.0)
        shard_calls.problem = DataLoss("part-0: is missing")
        recoveries.begin(shard)
        await until(recoveries.problem)
        assert recoveries.problem() == "shard 0 cannot be restored: part-0: is missing"
        shard_calls.problem = None
        await until(lambda: not recoveries._tasks)
        recoveries.begin(shard)  # by its next heartbeat
        await until(lambda: shard_calls.let_in and not recoveries._tasks)
        assert recoveries.problem() == ""
        await recoveries.close()

    asyncio.run(scene())


def test_a_long_call_ends_with_the_lease_of_its_shard(cluster: Cluster) -> None:
    class Silent:
        instance = 2
        is_ended = False

        async def stream(self, *_: Any) -> AsyncIterator[pb.LoadReply]:
            yield pb.LoadReply(rows=1)
            try:
                await asyncio.sleep(3600)
            finally:
                self.is_ended = True

    async def scene() -> None:
        shard_calls, link, shard = ShardCalls(cluster), Silent(), registered(cluster, 2, 0.0)
        shard_calls._links[0] = link  # type: ignore[assignment]
        replies = shard_calls.stream(shard, "Load", None)
        assert (await anext(replies)).rows == 1
        cluster.shards.expire(1e9)
        with pytest.raises(Unavailable, match="shard 0 was lost while it was asked to load"):
            await anext(replies)
        await until(lambda: link.is_ended)

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_SEC))


def test_what_a_shard_is_asked_to_load_does_not_grow_with_the_files(cluster: Cluster, tmp_path: Path) -> None:
    """gRPC bounds a message: with 50,000 files a shard could not come back."""
    folder = Folder(str(tmp_path))
    manifest = files.read_manifest(folder)
    parts = tuple(files.PartEntry(f"rows.0.{n}.safetensors", 1, "ab", 0, 0, 64, 1) for n in range(50_000))
    large = replace(manifest, tables=(files.TableEntry(manifest.tables[0].schema, parts),))
    (folder / manifest.name).put(files.FILE, large.to_bytes())

    async def scene() -> None:
        shard_calls = FakeFleet(cluster)
        shard_calls.may_end.set()
        recoveries = ShardRecoveries(cluster, shard_calls, TurnLock(), lambda: None)  # type: ignore[arg-type]
        recoveries.begin(registered(cluster, 2, 0.0))
        await until(lambda: shard_calls.let_in)
        assert 0 < shard_calls.request_bytes < 4096
        await recoveries.close()

    asyncio.run(scene())
