"""A coordinator that is killed and started again at its address: training goes on meanwhile, and nobody is lost."""

from __future__ import annotations

import os
import random
import secrets
import time
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from long_form import FULL
from restart_scene import DIM, LEASE_SEC, ROWS, Scene, Trained, facts, rows_of, status_of
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow_process import Launcher, wait_until

pytestmark = pytest.mark.started


@pytest.mark.parametrize("staleness", [2, *([None] if FULL else [])])
def test_training_goes_on_while_it_is_away(launcher: Launcher, tmp_path: Path, staleness: int | None) -> None:
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"seed {seed}")
    draw = random.Random(seed)
    coordinator = Scene(launcher, tmp_path)
    trained = Trained(coordinator.address, staleness)
    trained.go_on(1)
    before = facts(coordinator.address)
    url = str(tmp_path / "rows")
    trained.sessions[0].keep_rows(url, every_sec=0.5)
    for longer in (True, False):
        trained.go_on(draw.randrange(20))
        coordinator.kill()
        killed = time.monotonic()
        trained.go_on(5)
        while staleness == 2 and longer and time.monotonic() < killed + 2 * LEASE_SEC:  # every lease would have ended
            trained.go_on(1)
        coordinator.start()
        wait_until(coordinator.is_ready, "the shards to come back")
        assert facts(coordinator.address) == before
    returned = time.monotonic()
    while time.monotonic() < returned + 1.5 * LEASE_SEC:  # whoever has not come back would have left by now
        trained.go_on(1)
    assert facts(coordinator.address) == before
    saved = files.list_names(Folder(url))
    wait_until(lambda: files.list_names(Folder(url))[-1:] > saved[-1:], "rows that are saved as before")
    trained.end()
    for rank, done in enumerate(trained.steps):
        np.testing.assert_array_equal(rows_of(coordinator.address, rank), np.full((ROWS, DIM), -done, np.float32))
    assert all(shard.popen.poll() is None for shard in coordinator.shards)


@pytest.mark.full
def test_a_shard_that_came_back_is_neither_put_back_again_nor_given_away(launcher: Launcher, tmp_path: Path) -> None:
    coordinator = Scene(launcher, tmp_path)
    with sr.connect(coordinator.address, "restart", staleness=None, deadline_sec=20.0) as session:
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        keys, ones = np.arange(ROWS, dtype=np.uint64), np.ones((ROWS, DIM), np.float32)
        table.push(keys, ones)
        session.save(str(tmp_path / "ckpt"))
        ended = coordinator.shards[0]
        port = status_of(coordinator.address).shards[0].data.port
        ended.popen.kill()
        ended.end()
        wait_until(lambda: status_of(coordinator.address).shards[0].state == 4, "the end of its lease")
        again = coordinator.shard(0, f"--port={port}")
        wait_until(coordinator.is_ready, "the shard to come back")
        table.push(keys, ones)
        coordinator.kill()
        table.push(keys, ones)
        coordinator.start()
        # Nor is it given to another process while its holder has not been heard of yet.
        line = coordinator.shard(0).error_line()
        assert f"shard 0 is held by process {again.popen.pid}" in line
        wait_until(coordinator.is_ready, "the shards to come back")
        assert [shard.restores for shard in status_of(coordinator.address).shards] == [1, 0]
        np.testing.assert_array_equal(table.pull(keys), np.full((ROWS, DIM), -3.0))
