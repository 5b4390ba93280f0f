"""A cluster under the service units of docs/operations.md: a shard that is killed comes back, whoever works on it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from restart_scene import Scene, is_ready, status_of
from service_units import Service, unit_blocks
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import DeadlineExceeded, SparserowError, Unavailable
from sparserow_process import Launcher, free_port, wait_until

pytestmark = pytest.mark.started

KEYS = np.arange(400, dtype=np.uint64)
ONES = np.ones((len(KEYS), 4), np.float32)
SHARD = "sparserow-ps@.service"


class Units:
    """The coordinator and two shards, each a service."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        replaced = {"--port=7000": f"--port={port}", "/var/lib/sparserow": str(folder)}
        self.coordinator = Service(launcher, "sparserow-coordinator.service", replaced)
        self.coordinator.process.wait_for("coordinator at")
        self.shards = [
            Service(launcher, SHARD, {"127.0.0.1:7000": self.address}, instance=str(index)) for index in range(2)
        ]
        wait_until(lambda: is_ready(self.address), "the cluster to be ready")

    def kill(self, index: int) -> None:
        """SIGKILL, as the kernel's where memory is out."""
        shard = self.shards[index]
        before = len(shard.runs)
        shard.process.signal(signal.SIGKILL)
        wait_until(lambda: len(shard.runs) > before or shard.has_failed, "another process of the shard")

    def stop(self) -> None:
        for service in (*self.shards, self.coordinator):
            service.stop()


@pytest.fixture
def units(launcher: Launcher, tmp_path: Path) -> Iterator[Units]:
    made = Units(launcher, tmp_path)
    yield made
    made.stop()


def saved(url: Path) -> int:
    return len(files.list_names(Folder(str(url))))


def test_every_unit_is_started_again_without_a_limit() -> None:
    units = unit_blocks()
    assert set(units) == {"sparserow-coordinator.service", SHARD}
    for unit in units.values():
        assert unit["Unit"]["StartLimitIntervalSec"] == "0"
        assert unit["Service"]["Restart"] == "always"


def test_a_shard_waits_for_its_place_and_comes_back(units: Units, tmp_path: Path) -> None:
    shard = units.shards[1]
    with sr.connect(units.address, "units", staleness=None) as session:
        table = session.create_table("rows", dim=4, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
        table.push(KEYS, ONES)
        session.keep_rows(str(tmp_path / "kept"), every_sec=3600)
        wait_until(lambda: saved(tmp_path / "kept") == 1, "rows that are saved")
        units.kill(1)
        table.push(KEYS, ONES)
        np.testing.assert_array_equal(table.pull(KEYS), -2 * ONES)
    assert len(shard.runs) == 2, "the process that came waited for the place"
    assert shard.process.err.count("waits for the shard") == 1
    assert "is held by process" in shard.process.err
    assert [each.restores for each in status_of(units.address).shards] == [0, 1]


def test_a_shard_of_a_synchronous_job_is_let_in_when_the_job_has_ended(units: Units, tmp_path: Path) -> None:
    shard = units.shards[0]
    with sr.connect(units.address, "units", staleness=0, deadline_sec=3600.0) as session:
        table = session.create_table("rows", dim=4, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
        table.push(KEYS, ONES)
        session.save(str(tmp_path / "saved"))
        units.kill(0)
        # The coordinator tells the worker long before its deadline.
        told = "shard 0 ended with its rows of 1 tables, and job units/units is synchronous: .*; connect anew when the"
        with pytest.raises(Unavailable, match=told):
            table.push(KEYS, ONES)
        assert "is synchronous" in shard.process.err
        assert shard.process.popen.poll() is None
        assert not is_ready(units.address)
    wait_until(lambda: is_ready(units.address), "the shard to be let in")
    assert len(shard.runs) == 2
    words = shard.process.err
    assert "another process is accepted when the job has ended; this process waits for the shard" in words
    assert "start a new cluster" not in words
    with sr.connect(units.address, "units", staleness=0) as session:
        session.restore(str(tmp_path / "saved"))
        assert (session.table("rows").pull(KEYS) == -1).all()


def test_a_process_waits_while_the_holder_is_silent_and_ends_when_that_one_lives(
    launcher: Launcher, tmp_path: Path
) -> None:
    scene = Scene(launcher, tmp_path, "--shard-lease=60s")  # longer than the start of two processes
    holder = scene.shards[0]
    holder.signal(signal.SIGSTOP)
    second = scene.shard(0, "--log-level=warning")
    second.wait_for("waits for the shard")
    second.signal(signal.SIGTERM)
    assert second.end() == 0, second.err
    third = scene.shard(0, "--log-level=warning")
    third.wait_for("waits for the shard")
    holder.signal(signal.SIGCONT)  # two processes for one shard are a mistake
    assert third.end() == 1
    assert third.complaints[-1].startswith("sparserow: FailedPrecondition: shard 0 is held by process")
    wait_until(scene.is_ready, "the holder to serve as before")


def test_the_deadline_of_a_push_holds_while_no_process_comes(launcher: Launcher, tmp_path: Path) -> None:
    options = ("--shards=1", "--port=0", "--shard-lease=1s")
    address = launcher.start("coordinator", *options).wait_for(r"coordinator at (\S+:\d+)")[1]
    shard = launcher.start("ps", f"--coordinator={address}", "--shard=0")
    wait_until(lambda: is_ready(address), "the cluster to be ready")
    ends: list[SparserowError | None] = []
    with sr.connect(address, "units", staleness=None, deadline_sec=4.0) as session:
        table = session.create_table("rows", dim=4, optimizer=sr.optim.SGD(lr=1.0))
        table.push(KEYS, ONES)
        session.save(str(tmp_path / "saved"))
        shard.signal(signal.SIGKILL)
        shard.end()

        def push() -> None:
            try:
                table.push(KEYS, ONES)
                ends.append(None)
            except SparserowError as error:
                ends.append(error)

        pushing = threading.Thread(target=push, daemon=True)
        pushing.start()
        pushing.join(60)  # leases end, and heartbeats go on, many times
        assert ends, "the push has not ended"
        assert isinstance(ends[0], Unavailable | DeadlineExceeded)
