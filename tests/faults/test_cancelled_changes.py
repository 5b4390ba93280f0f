"""Clients that are gone before every shard has been told: what they began is done everywhere all the same."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import sparserow as sr
from restart_scene import Scene, status_of
from sparserow.proto import control_pb2 as pb
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import DeadlineExceeded
from sparserow.proto.optim import SGD
from sparserow.proto.schema import Constant, TableSchema
from sparserow.proto.schema_message import message_of_schema
from sparserow.ps_server.coordinator.procedures.shard_calls import ShardCalls
from sparserow.ps_server.coordinator.service import CoordinatorService
from sparserow.ps_server.coordinator.state.cluster import Cluster, ClusterOptions
from sparserow.ps_server.coordinator.state.shards import Shard
from sparserow_process import Launcher, wait_until

KEYS = np.arange(500, dtype=np.uint64)
ONES = np.ones((len(KEYS), 4), np.float32)
SCHEMA = TableSchema("gone", "rows", 4, SGD(lr=1.0), init=Constant(0.0))


@pytest.fixture
def scene(launcher: Launcher, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(launcher, tmp_path)
    yield made
    made.shards[1].signal(signal.SIGCONT)


def tables_of(address: str) -> list[list[tuple[str, int]]]:
    """Of each shard, its tables and how many rows they have there."""
    return [[(table.name, table.rows) for table in shard.tables] for shard in status_of(address).shards]


def leave_while_shard_1_is_stopped(scene: Scene, change: Any) -> None:
    """Gives a change up when shard 0 has done it and shard 1 cannot answer."""
    before = tables_of(scene.address)[0]
    scene.shards[1].signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(scene.shards[1].popen.pid).status() == psutil.STATUS_STOPPED, "the stop")
    with ControlClient(scene.address, deadline_sec=0.5) as hasty, pytest.raises(DeadlineExceeded):
        change(hasty)
    wait_until(lambda: tables_of(scene.address)[0] != before, "shard 0 to do its part")
    scene.shards[1].signal(signal.SIGCONT)


def test_rows_of_a_dropped_table_do_not_come_back(scene: Scene) -> None:
    with sr.connect(scene.address, "gone", staleness=None) as session:
        table = session.create_table("rows", dim=4, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
        table.push(KEYS, ONES)
        leave_while_shard_1_is_stopped(scene, lambda control: control.drop_table("gone", "rows"))
        wait_until(scene.is_ready, "the cluster to be ready")
        table = session.create_table("rows", dim=4, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
        np.testing.assert_array_equal(table.pull(KEYS), 0 * ONES)
        assert tables_of(scene.address) == [[("gone/rows", 0)], [("gone/rows", 0)]]


def test_a_created_table_is_on_every_shard(scene: Scene) -> None:
    leave_while_shard_1_is_stopped(scene, lambda control: control.create_table(SCHEMA))
    both = [[[("gone/rows", 0)]] * 2, [[], []]]  # on all or on none, as the coordinator lists it
    wait_until(lambda: scene.is_ready() and tables_of(scene.address) in both, "the shards to be of one mind")
    with ControlClient(scene.address) as control:
        assert len(control.list_tables("gone")) == len(tables_of(scene.address)[1])


def test_a_shard_that_takes_long_to_be_told_serves_all_the_same() -> None:
    """Each heartbeat gives up before all is told; the next ones wait for the same words."""

    class Slow:
        told = 0

        def __init__(self, cluster: Cluster) -> None:
            self.cluster, self.gate = cluster, asyncio.Event()

        async def catch_up(self, shard: Shard) -> None:
            self.told += 1
            await self.gate.wait()
            self.cluster.shards.mark_serving(shard.index, shard.instance)

    async def run() -> None:
        cluster = Cluster.create(ClusterOptions(shards=1, slot_count=64))
        shard_calls = Slow(cluster)
        service = CoordinatorService(cluster, shard_calls, save=lambda: None)  # type: ignore[arg-type]
        address = pb.Address(host="127.0.0.1", port=7)
        await service.RegisterShard(pb.RegisterShardRequest(instance=5, control=address), None)
        beat = pb.ShardHeartbeatRequest(instance=5, data=address)
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(service.ShardHeartbeat(beat, None), 0.05)
        assert shard_calls.told == 1
        shard_calls.gate.set()
        await service.ShardHeartbeat(beat, None)
        assert (cluster.shards.problem(), shard_calls.told) == ("", 1)
        await service.close()

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("method", ["CreateTable", "DropTable"])
def test_a_change_whose_caller_is_gone_reaches_the_shard_that_was_busy(method: str) -> None:
    class Link:
        """A shard's connection; what it is asked is done."""

        instance = 5

        def __init__(self) -> None:
            self.lock, self.asked = asyncio.Lock(), asyncio.Queue[str]()

        async def call(self, method: str, _: Any) -> None:
            await self.asked.put(method)

        async def close(self) -> None: ...

    async def run() -> None:
        cluster = Cluster.create(ClusterOptions(shards=2, slot_count=64))
        shard_calls = ShardCalls(cluster)
        links = [Link(), Link()]
        for index, link in enumerate(links):
            place = {"instance": 5, "control": ("127.0.0.1", 7)}
            cluster.shards.register(index, **place, pid=1, tables=0, now=0.0)  # type: ignore[arg-type]
            cluster.shards.mark_serving(index, 5)
            shard_calls._links[index] = link  # type: ignore[assignment]
        service = CoordinatorService(cluster, shard_calls, save=lambda: None)
        create = pb.CreateTableRequest(schema=message_of_schema(SCHEMA))
        if method == "DropTable":
            await service.CreateTable(create, None)
            assert [await link.asked.get() for link in links] == ["CreateTable"] * 2
            change = service.DropTable(pb.DropTableRequest(namespace="gone", name="rows"), None)
        else:
            change = service.CreateTable(create, None)
        async with links[1].lock:  # as while it is told of a job's members
            caller = asyncio.ensure_future(change)
            assert await links[0].asked.get() == method
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
        assert await links[1].asked.get() == method
        await service.close()

    asyncio.run(asyncio.wait_for(run(), 60))
