"""Workers that are killed in the middle of a commit, or stopped beyond their lease: others go on, all shards agree."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fault_proxy import ACK, COMMIT, FaultProxy, Faults
from sparserow.cpp_ext import _client
from sparserow.deploy.launch.local_cluster import LocalCluster, local_cluster
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import error_of
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow_process import DEADLINE_SEC, stop, wait_until

pytestmark = pytest.mark.started

SCRIPT = Path(__file__).parents[1] / "support" / "lone_worker.py"
KEYS = np.arange(64, dtype=np.uint64)
DIM = 4
LEASE_SEC = 6.0
STEPS = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    _client.set_error_factory(error_of)
    with local_cluster(shards=2, worker_lease=LEASE_SEC) as running:
        yield running


class LoneWorker:
    """``lone_worker.py`` with its lines as they come."""

    def __init__(
        self, coordinator: str, job: str, rank: int, staleness: int, hold_at: int, ports: str, kind: str = "step"
    ) -> None:
        numbers = (rank, 2, staleness, STEPS, hold_at)
        command = [sys.executable, str(SCRIPT), coordinator, job, *map(str, numbers), ports, kind]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._queue: queue.Queue[str] = queue.Queue()
        self._ended = False  # its output has been read to the end
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.strip())
        self._queue.put("")

    def wait_for(self, wanted: str) -> None:
        """Reads on until a line; fails when the output ends first, or after DEADLINE_SEC without a line."""
        while not self.lines or self.lines[-1] != wanted:
            line = self._queue.get(timeout=DEADLINE_SEC)
            self._ended = not line
            assert line, f"ended without {wanted!r}: {self.lines}"
            self.lines.append(line)

    @property
    def committed(self) -> int:
        """Steps whose commit was acknowledged by all shards."""
        return sum(line.startswith("committed") for line in self.lines)

    def go_on(self) -> None:
        """Lets it go on from the step at which it holds."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kills it if it lives, reaps it, and reads what it still said."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(DEADLINE_SEC)
        while not self._ended:
            line = self._queue.get(timeout=DEADLINE_SEC)
            self._ended = not line
            self.lines += [line] if line else []


class Scene:
    """Two workers of one job, the second one behind proxies, and the table that both add to."""

    def __init__(
        self,
        cluster: LocalCluster,
        staleness: int,
        faults: tuple[Faults, Faults],
        hold_at: tuple[int, int] = (-1, -1),
        kind: str = "step",
    ) -> None:
        self.control = ControlClient(cluster.address)
        known = [table.name for table in self.control.list_tables("death")]
        if known:
            self.control.drop_table("death", "rows")
        self.table = self.control.create_table(TableSchema("death", "rows", DIM, SGD(lr=1.0)))
        self.view = self.control.cluster()
        self.proxies = [
            FaultProxy(shard.port, fault, seed=1) for shard, fault in zip(self.view.shards, faults, strict=True)
        ]
        job = f"job-{os.urandom(4).hex()}"
        ports = ",".join(str(proxy.port) for proxy in self.proxies)
        self.workers = [
            LoneWorker(cluster.address, job, 0, staleness, hold_at[0], "0,0"),
            LoneWorker(cluster.address, job, 1, staleness, hold_at[1], ports, kind),
        ]

    def applied(self) -> list[int]:
        """Commits that each shard has applied to its rows; every row of a shard has the same ones."""
        client = _client.Client(
            shards=[(shard.host, shard.port) for shard in self.view.shards],
            slot_owner=self.view.slot_owner,
            route_epoch=self.view.route_epoch,
            cluster_id=self.view.cluster_id,
        )
        counts = []
        for shard in range(2):
            rows = np.concatenate([page[3] for page in client.scan(self.table.id, shard=shard)])
            assert len(rows) > 0
            assert (rows == rows[0, 0]).all()
            counts.append(int(-rows[0, 0]))
        return counts

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        for proxy in self.proxies:
            proxy.stop()
        self.control.close()


NOTHING = Faults()
NO_COMMIT = Faults(cut_before=1.0, kinds=frozenset({COMMIT}))


@pytest.mark.parametrize(("staleness", "kind"), [(0, "step"), (3, "step"), (3, "key")])
@pytest.mark.parametrize("reaches", ["one shard", "no shard"])
def test_killed_between_prepare_and_commit(cluster: LocalCluster, staleness: int, kind: str, reaches: str) -> None:
    scene = Scene(cluster, staleness, (NOTHING if reaches == "one shard" else NO_COMMIT, NO_COMMIT), kind=kind)
    try:
        survivor, victim = scene.workers
        victim.wait_for("prepared 0")
        if reaches == "one shard":  # it has acknowledged PREPARE and COMMIT
            wait_until(lambda: scene.proxies[0].replies[ACK] >= 2, "shard 0 to take the commit")
        victim.process.kill()
        survivor.wait_for("done")
        victim.kill()
        assert survivor.committed == STEPS
        assert victim.committed == 0
        # The commit that one shard has taken is applied by both; one that none has is forgotten by both.
        in_doubt = 1 if reaches == "one shard" else 0
        assert scene.applied() == [STEPS + in_doubt] * 2
    finally:
        scene.close()


@pytest.mark.parametrize("staleness", [0, 2])
def test_stopped_beyond_its_lease_and_back(cluster: LocalCluster, staleness: int) -> None:
    scene = Scene(cluster, staleness, (NOTHING, NOTHING), hold_at=(STEPS - 1, 2))
    try:
        survivor, stopped = scene.workers
        stopped.wait_for("prepared 2")
        stop(stopped.process.pid)
        survivor.wait_for(f"prepared {STEPS - 1}")  # its pulls waited until the lease ended
        stopped.process.send_signal(signal.SIGCONT)
        stopped.go_on()
        stopped.wait_for("Fenced")
        stopped.kill()
        survivor.go_on()
        survivor.wait_for("done")
        assert survivor.committed == STEPS
        assert stopped.committed == 2
        # What was acknowledged is there; what was prepared and never committed is nowhere.
        assert scene.applied() == [STEPS + 2] * 2
    finally:
        scene.close()


def test_who_leaves_in_order_keeps_what_it_committed_and_holds_nobody(cluster: LocalCluster) -> None:
    scene = Scene(cluster, 0, (NOTHING, NOTHING))
    try:
        for worker in scene.workers:
            worker.wait_for("done")
        assert scene.applied() == [2 * STEPS] * 2
    finally:
        scene.close()
