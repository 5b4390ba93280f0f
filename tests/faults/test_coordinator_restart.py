"""A coordinator that is killed and started again at its address: training goes on meanwhile, and nobody is lost."""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sparserow as sr
import torch
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import SparserowError
from sparserow_process import Launcher, Process, free_port, wait_until
from torch import nn

ROWS, DIM, LEASE_SEC = 300, 4, 2.0


class AllRows(nn.Module):
    """The rows of one worker's table: a process binds each table once."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.add_module(f"rows{rank}", nn.Embedding(ROWS, DIM))

    def forward(self) -> torch.Tensor:
        (rows,) = self.children()
        return rows(torch.arange(ROWS)).sum()


class Trained:
    """Two workers in threads of this process; each step takes one from every row of the worker's table."""

    def __init__(self, address: str, staleness: int | None) -> None:
        self.steps = [0, 0]
        self.sessions: list[sr.Session] = []
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(2)
        self._ends = [self._pool.submit(self._train, rank, address, staleness) for rank in range(2)]

    def _train(self, rank: int, address: str, staleness: int | None) -> None:
        with sr.connect(
            address, "restart", staleness=staleness, rank=rank, world_size=2, grad_scale="sum", deadline_sec=20.0
        ) as session:
            self.sessions.append(session)
            table = sr.Table(init=sr.Constant(0.0))
            model = sr.distribute(AllRows(rank), session, optimizer=sr.SGD(lr=1.0), min_rows=100, tables={"*": table})
            while not self._stop.is_set():
                model().backward()
                session.step()
                self.steps[rank] += 1
                time.sleep(0.005)
            session.flush()

    def go_on(self, steps: int) -> None:
        """Waits until each worker has done so many more steps."""
        wanted = [done + steps for done in self.steps]

        def are_done() -> bool:
            for end in self._ends:
                if end.done():
                    end.result()
            return all(done >= want for done, want in zip(self.steps, wanted, strict=True))

        wait_until(are_done, f"{steps} more steps")

    def end(self) -> None:
        """Both leave."""
        self._stop.set()
        for end in self._ends:
            end.result(60)
        self._pool.shutdown()


class Coordinator:
    """A process at a fixed address with its state on disk, and two shards."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher = launcher
        self.address = f"127.0.0.1:{free_port()}"
        self._options = ("--shards=2", "--slot-count=64", f"--port={self.address.rpartition(':')[2]}",
                         f"--worker-lease={LEASE_SEC}s", f"--shard-lease={LEASE_SEC}s",
                         f"--state={folder / 'state.json'}", "--log-level=warning")  # fmt: skip
        self.process = self.start()
        self.shards = [self.shard(index) for index in range(2)]
        wait_until(self.is_ready, "the cluster to be ready")

    def start(self) -> Process:
        self.process = self._launcher.start("coordinator", *self._options)
        self.process.wait_for(r"coordinator at (\S+:\d+)")
        return self.process

    def shard(self, index: int, *options: str) -> Process:
        where = (f"--coordinator={self.address}", f"--shard={index}")
        return self._launcher.start("ps", *where, "--log-level=error", *options)

    def kill(self) -> None:
        self.process.popen.kill()
        self.process.end()

    def is_ready(self) -> bool:
        try:
            return self.status().ready
        except SparserowError:
            return False

    def status(self):
        with ControlClient(self.address) as control:
            return control.status()

    def facts(self) -> object:
        """What a restart must not change."""
        status = self.status()
        places = [(it.shard, it.pid, it.data.port, it.control.port, it.slots, it.restores) for it in status.shards]
        tables = [table.SerializeToString() for table in status.tables]
        jobs = [(job.name, [(it.rank, it.worker_id, it.epoch) for it in job.members]) for job in status.jobs]
        return status.cluster_id, status.route_epoch, places, tables, jobs


def rows_of(address: str, rank: int) -> np.ndarray:
    with sr.connect(address, "restart", job="reader", staleness=None) as session:
        return session.table(f"rows{rank}").pull(np.arange(ROWS, dtype=np.uint64))


@pytest.mark.parametrize("staleness", [None, 2])
def test_training_goes_on_while_it_is_away(launcher: Launcher, tmp_path: Path, staleness: int | None) -> None:
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"seed {seed}")
    draw = random.Random(seed)
    coordinator = Coordinator(launcher, tmp_path)
    trained = Trained(coordinator.address, staleness)
    trained.go_on(1)
    before = coordinator.facts()
    url = str(tmp_path / "rows")
    sr.keep_rows(trained.sessions[0], url, every_sec=0.5)
    for longer in (True, False):
        trained.go_on(draw.randrange(20))
        coordinator.kill()
        killed = time.monotonic()
        trained.go_on(5)
        while staleness == 2 and longer and time.monotonic() < killed + 2 * LEASE_SEC:  # every lease would have ended
            trained.go_on(1)
        coordinator.start()
        wait_until(coordinator.is_ready, "the shards to come back")
        assert coordinator.facts() == before
    returned = time.monotonic()
    while time.monotonic() < returned + 1.5 * LEASE_SEC:  # whoever has not come back would have left by now
        trained.go_on(1)
    assert coordinator.facts() == before
    saved = files.list_names(Folder(url))
    wait_until(lambda: files.list_names(Folder(url))[-1:] > saved[-1:], "rows that are saved as before")
    trained.end()
    for rank, done in enumerate(trained.steps):
        np.testing.assert_array_equal(rows_of(coordinator.address, rank), np.full((ROWS, DIM), -done, np.float32))
    assert all(shard.popen.poll() is None for shard in coordinator.shards)


def test_a_shard_that_came_back_is_neither_put_back_again_nor_given_away(launcher: Launcher, tmp_path: Path) -> None:
    coordinator = Coordinator(launcher, tmp_path)
    with sr.connect(coordinator.address, "restart", staleness=None, deadline_sec=20.0) as session:
        table = session.create_table("rows", dim=DIM, optimizer=sr.SGD(lr=1.0))
        keys, ones = np.arange(ROWS, dtype=np.uint64), np.ones((ROWS, DIM), np.float32)
        table.push(keys, ones)
        sr.save(session, str(tmp_path / "ckpt"))
        ended = coordinator.shards[0]
        port = coordinator.status().shards[0].data.port
        ended.popen.kill()
        ended.end()
        wait_until(lambda: coordinator.status().shards[0].state == 4, "the end of its lease")
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
        assert [shard.restores for shard in coordinator.status().shards] == [1, 0]
        np.testing.assert_array_equal(table.pull(keys), np.full((ROWS, DIM), -3.0))
