"""Training that goes on while coordinators come and go, and what must be the same afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

import sparserow as sr
from sparserow.proto import control_pb2 as pb
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import SparserowError
from sparserow_process import Launcher, Process, free_port, wait_until

ROWS, DIM, LEASE_SEC = 300, 4, 5.0


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
            model = session.distribute(AllRows(rank), optimizer=sr.optim.SGD(lr=1.0), min_rows=100, tables={"*": table})
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
            end.result(120)
        self._pool.shutdown()


class Scene:
    """A coordinator at a fixed address with its state on disk, and two shards, all of them processes."""

    def __init__(self, launcher: Launcher, folder: Path, *options: str) -> None:
        self.launcher = launcher
        self.address = f"127.0.0.1:{free_port()}"
        self._options = ("--shards=2", "--slot-count=64", f"--port={self.address.rpartition(':')[2]}",
                         f"--worker-lease={LEASE_SEC}s", f"--shard-lease={LEASE_SEC}s",
                         f"--state={folder / 'state.json'}", "--log-level=warning", *options)  # fmt: skip
        self.process = self.start()
        self.shards = [self.shard(index) for index in range(2)]
        wait_until(self.is_ready, "the cluster to be ready")

    def start(self) -> Process:
        """Starts the coordinator (again)."""
        self.process = self.launcher.start("coordinator", *self._options)
        self.process.wait_for(r"coordinator at (\S+:\d+)")
        return self.process

    def shard(self, index: int, *options: str) -> Process:
        """Starts a shard."""
        where = (f"--coordinator={self.address}", f"--shard={index}")
        return self.launcher.start("ps", *where, "--log-level=error", *options)

    def kill(self) -> None:
        """Ends the coordinator."""
        self.process.popen.kill()
        self.process.end()

    def is_ready(self) -> bool:
        """Whether all shards serve."""
        return is_ready(self.address)


def is_ready(address: str) -> bool:
    """Whether a cluster's coordinator answers and all shards serve."""
    try:
        return bool(status_of(address).ready)
    except SparserowError:
        return False


def status_of(address: str) -> pb.GetStatusReply:
    """All that a coordinator says."""
    with ControlClient(address) as control:
        return control.status()


def shard_returns(cluster: sr.LocalCluster, index: int) -> None:
    """Kills a shard, and waits until another process has its rows."""
    with ControlClient(cluster.address) as control:
        before = control.status().shards[index]
        os.kill(before.pid, signal.SIGKILL)
        wait_until(
            lambda: control.status().shards[index].restores > before.restores and control.status().ready,
            "the rows of the shard",
            120,
        )


def facts(address: str) -> object:
    """What a restart of the coordinator must not change."""
    status = status_of(address)
    places = [(it.shard, it.pid, it.data.port, it.control.port, it.slots, it.restores) for it in status.shards]
    tables = [table.SerializeToString() for table in status.tables]
    jobs = [(job.name, [(it.rank, it.worker_id, it.epoch) for it in job.members]) for job in status.jobs]
    return status.cluster_id, status.route_epoch, places, tables, jobs


def rows_of(address: str, rank: int) -> np.ndarray:
    """The rows of a worker of :class:`Trained`."""
    with sr.connect(address, "restart", job="reader", staleness=None) as session:
        return session.table(f"rows{rank}").pull(np.arange(ROWS, dtype=np.uint64))
