"""A state that takes long to be written holds up what depends on it, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slow_etcd import SlowEtcd
from sparserow.proto import control_pb2 as pb
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import ResourceExhausted, SparserowError
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.ps_server.coordinator.storage.state_writer import StateWriter
from sparserow_process import Launcher, wait_until


@pytest.fixture
def etcd() -> Iterator[SlowEtcd]:
    made = SlowEtcd()
    yield made
    made.close()


def test_a_slow_etcd_holds_up_what_is_written_alone(launcher: Launcher, etcd: SlowEtcd) -> None:
    options = ("--shards=1", "--slot-count=64", "--port=0", f"--state={etcd.url}")
    address = launcher.start("coordinator", *options).wait_for(r"coordinator at (\S+:\d+)")[1]
    launcher.start("ps", f"--coordinator={address}", "--shard=0")
    with ControlClient(address, deadline_sec=60.0) as control:
        wait_until(lambda: _is_ready(control), "the cluster to be ready")
        etcd.writes.clear()
        ends: list[bool] = []

        def create() -> None:
            control.create_table(TableSchema("slow", "rows", 4, SGD(lr=1.0)))
            ends.append(etcd.writes.is_set())

        creating = threading.Thread(target=create, daemon=True)
        creating.start()
        assert etcd.waiting.wait(60)
        with ControlClient(address, deadline_sec=10.0) as other:
            for _ in range(5):
                status = other.status()
                assert status.ready
                assert not status.shards[0].tables, "a shard was told of what is not written"
        assert not ends
        etcd.writes.set()
        creating.join(60)
        assert ends == [True]
        assert [table.name for table in control.status().shards[0].tables] == ["slow/rows"]


def test_a_leader_that_is_gone_leaves_the_checkpoint_that_its_last_state_may_name(
    launcher: Launcher, etcd: SlowEtcd, tmp_path: Path
) -> None:
    options = ("--shards=1", "--slot-count=64", "--port=0", f"--state={etcd.url}")
    coordinator = launcher.start("coordinator", *options)
    address = coordinator.wait_for(r"coordinator at (\S+:\d+)")[1]
    launcher.start("ps", f"--coordinator={address}", "--shard=0")
    url = str(tmp_path)
    with ControlClient(address, deadline_sec=60.0) as control:
        wait_until(lambda: _is_ready(control), "the cluster to be ready")
        name = control.begin_save(url, None, deadline_sec=60.0).name
        etcd.writes.clear()
        control.enter_save(pb.EnterSaveRequest(url=url, name=name), None, deadline_sec=60.0)
        assert etcd.waiting.wait(60)
        assert control.get_save(url, name).phase != pb.SAVED, "its state is not written"
        etcd.end_lease()
        coordinator.wait_for("does not lead any more")
        assert files.list_names(Folder(url)) == [name]
        etcd.writes.set()
        wait_until(lambda: _is_ready(control), "the next term")
        assert files.list_names(Folder(url)) == [name]


def _is_ready(control: ControlClient) -> bool:
    try:
        return bool(control.status().ready)
    except SparserowError:
        return False


def test_states_that_come_while_one_is_written_are_one_write_and_a_failure_is_told() -> None:
    kept: list[Any] = []
    gate = threading.Event()
    problems: list[Exception] = []

    def write(document: dict[str, Any]) -> None:
        assert gate.wait(60)
        if problems:
            raise problems.pop()
        kept.append(document["n"])

    async def run() -> None:
        number = 0
        writer = StateWriter(lambda: {"n": number}, write)
        await writer.written()  # there is nothing to write
        for number in range(1, 5):  # noqa: B007 - the state of now
            writer.save()
            await asyncio.sleep(0)
        waiting = asyncio.ensure_future(writer.written())
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        await waiting
        assert (kept[-1], len(kept) <= 2) == (4, True)
        problems.append(ResourceExhausted("full"))
        number = 5
        writer.save()
        with pytest.raises(ResourceExhausted):
            await writer.written()
        assert kept[-1] == 4
        await writer.written()  # tries again
        assert kept[-1] == 5
        await writer.close()

    asyncio.run(asyncio.wait_for(run(), 60))
