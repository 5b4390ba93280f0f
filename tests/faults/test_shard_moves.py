"""A shard that died comes back at another address, as under a scheduler: a session that is at work finds it there."""

from __future__ import annotations

import signal

import numpy as np
import pytest

import sparserow as sr
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.control import ControlClient
from sparserow_process import Launcher, Process, wait_until

pytestmark = pytest.mark.started

KEYS = np.arange(400, dtype=np.uint64)
ONES = np.ones((len(KEYS), 4), np.float32)


@pytest.mark.full("test_ray.py moves one too")
def test_a_session_follows_a_shard_to_its_new_address(launcher: Launcher, tmp_path) -> None:
    options = ("--shards=2", "--port=0", "--slot-count=64", "--worker-lease=3s", "--shard-lease=1s")
    address = launcher.start("coordinator", *options).wait_for(r"coordinator at (\S+:\d+)")[1]

    def start_shard(index: int):
        process = launcher.start("ps", f"--coordinator={address}", f"--shard={index}")
        return process, process.wait_for(r"rows are served at (\S+:\d+)")[1]

    _, (shard, before) = start_shard(0), start_shard(1)
    with ControlClient(address) as control:
        wait_until(lambda: control.status().ready, "the cluster to be ready")
        with sr.connect(address, "moves", staleness=None, deadline_sec=60.0) as session:
            table = session.create_table("rows", dim=4, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
            table.push(KEYS, ONES)
            session.keep_rows(str(tmp_path / "kept"), every_sec=3600)
            wait_until(lambda: len(files.list_names(Folder(str(tmp_path / "kept")))) == 1, "rows that are saved")
            table.push(KEYS, ONES)
            shard.signal(signal.SIGKILL)
            wait_until(lambda: not control.status().ready, "the shard's lease to end")
            _, after = start_shard(1)
            assert after != before
            table.push(KEYS, ONES)
            np.testing.assert_array_equal(table.pull(KEYS), -3 * ONES)
        assert [shard.restores for shard in control.status().shards] == [0, 1]


@pytest.mark.parametrize("staleness", [None, 0])
def test_a_session_follows_a_shard_that_ended_before_the_first_table(launcher: Launcher, staleness: int | None) -> None:
    options = ("--shards=2", "--port=0", "--slot-count=64", "--worker-lease=3s", "--shard-lease=1s")
    address = launcher.start("coordinator", *options).wait_for(r"coordinator at (\S+:\d+)")[1]

    def start_shard(index: int) -> Process:
        process = launcher.start("ps", f"--coordinator={address}", f"--shard={index}")
        process.wait_for(r"rows are served at")
        return process

    _, shard = start_shard(0), start_shard(1)
    with ControlClient(address) as control:
        wait_until(lambda: control.status().ready, "the cluster to be ready")
        with sr.connect(address, "moves", staleness=staleness) as session:
            shard.signal(signal.SIGKILL)
            wait_until(lambda: not control.status().ready, "the shard's lease to end")
            start_shard(1)
            wait_until(lambda: control.status().ready, "the cluster to be ready again")
            table = session.create_table("rows", dim=4, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
            table.push(KEYS, ONES)
            np.testing.assert_array_equal(table.pull(KEYS), -ONES)
