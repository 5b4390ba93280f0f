"""What membership means for rows: fencing, clocks and budgets as the data plane of real shards sees them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sparserow.cpp_ext import _client
from sparserow.deploy.launch.local_cluster import LocalCluster, local_cluster
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import (
    DeadlineExceeded,
    Fenced,
    ResourceExhausted,
    Unavailable,
    error_of,
)
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.proto.worker_identity import WorkerIdentity
from sparserow_process import DEADLINE_SEC, Launcher, wait_until

DIM = 4
KEYS = np.arange(64, dtype=np.uint64)
LEASE_SEC = 10.0  # most tests renew none: they are to be over by then, also where they have little CPU


@pytest.fixture(scope="module", autouse=True)
def errors() -> None:
    """Native errors are exceptions of the taxonomy here too."""
    _client.set_error_factory(error_of)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(shards=2, memory_budget="64MiB", worker_lease=LEASE_SEC) as running:
        yield running


@pytest.fixture
def control(cluster: LocalCluster) -> Iterator[ControlClient]:
    with ControlClient(cluster.address) as connected:
        yield connected


class Worker:
    """A rank with its connection to the shards; gradients are all ones, the learning rate is 1."""

    def __init__(self, control: ControlClient, identity: WorkerIdentity, table_id: int, route_epoch: int = 0) -> None:
        view = control.cluster()
        self.identity = identity
        self._table_id = table_id
        self._sequence = 0
        self._client = _client.Client(
            shards=[(shard.host, shard.port) for shard in view.shards],
            slot_owner=view.slot_owner,
            route_epoch=route_epoch or view.route_epoch,
            cluster_id=view.cluster_id,
            job_id=identity.job_id,
            worker_id=identity.worker_id,
            worker_epoch=identity.epoch,
            worker_proof=identity.proof,
        )

    def push(self, step: int, scale: float = 1.0) -> None:
        self._sequence += 1
        grads = np.full((len(KEYS), DIM), scale, np.float32)
        self._client.push(self._table_id, KEYS, grads, dim=DIM, lr=1.0, sequence=self._sequence, step=step)

    def pull(self, step: int = -1, deadline_ms: int = 20_000) -> np.ndarray:
        rows, _, _ = self._client.pull(self._table_id, KEYS, dim=DIM, step=step, deadline_ms=deadline_ms)
        return rows


def join(control: ControlClient, job: str, world_size: int, staleness: int | None = 0) -> list[Worker]:
    table = control.create_table(TableSchema("rows", job, DIM, SGD(lr=1.0)))

    def register(rank: int) -> WorkerIdentity:
        return control.register_worker(
            namespace="rows", job=job, rank=rank, world_size=world_size, staleness=staleness, deadline_sec=30.0
        )

    with ThreadPoolExecutor(world_size) as pool:
        return [Worker(control, identity, table.id) for identity in pool.map(register, range(world_size))]


def test_every_rank_is_known_to_every_shard_when_it_has_joined(control: ControlClient) -> None:
    workers = join(control, "joined", 2)
    for worker, scale in zip(workers, (1.0, 3.0), strict=True):
        worker.push(0, scale)
    for worker in workers:
        assert np.array_equal(worker.pull(1), np.full((len(KEYS), DIM), -2.0))  # the mean of 1 and 3


def test_an_old_epoch_is_fenced_by_the_shards(control: ControlClient) -> None:
    (old,) = join(control, "fenced", 1)
    old.push(0)
    (new,) = join(control, "fenced", 1)
    with pytest.raises(Fenced):
        old.push(1)
    before = new.pull()
    new.push(0)  # the clock began anew, the rows did not
    assert np.array_equal(new.pull(1), before - 1)


def test_all_workers_of_a_clocked_job_go_back_together(control: ControlClient) -> None:
    old = join(control, "together", 2)
    for worker in old:
        worker.push(0)
    new = join(control, "together", 2)
    for worker in old:
        with pytest.raises(Fenced):
            worker.push(1)
    for worker in new:
        worker.push(0)
    assert np.array_equal(new[0].pull(1), np.full((len(KEYS), DIM), -2.0))


def test_a_silent_worker_is_fenced_and_holds_the_clock_no_longer(control: ControlClient) -> None:
    talking, silent = join(control, "silent", 2)
    talking.push(0)
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(talking.pull, 1)
        while not rows.done():
            control.heartbeat_worker(talking.identity, step=1)
            time.sleep(0.1)
        assert np.array_equal(rows.result(DEADLINE_SEC), np.full((len(KEYS), DIM), -1.0))
    with pytest.raises(Fenced):
        silent.push(0)


def test_a_rank_of_an_async_job_comes_back_alone(control: ControlClient) -> None:
    zero, one = join(control, "alone", 2, staleness=None)
    zero.push(0)
    again = Worker(
        control,
        control.register_worker(namespace="rows", job="alone", rank=0, world_size=2, staleness=None),
        control.create_table(TableSchema("rows", "alone", DIM, SGD(lr=1.0))).id,
    )
    with pytest.raises(Fenced):
        zero.push(1)
    assert again.identity.first_step == 1  # after what was committed before it came
    again.push(1)
    one.push(0)
    assert np.array_equal(one.pull(), np.full((len(KEYS), DIM), -1.5))  # three halves


def test_a_worker_that_has_left_is_refused(control: ControlClient) -> None:
    (worker,) = join(control, "left", 1)
    worker.push(0)
    control.deregister_worker(worker.identity)
    with pytest.raises(Fenced, match="job 'rows/left' is over: all its workers have left, or their leases have ended"):
        worker.push(1)


def test_a_route_from_the_future_is_waited_for(control: ControlClient) -> None:
    (worker,) = join(control, "stale", 1)
    table = control.create_table(TableSchema("rows", "stale", DIM, SGD(lr=1.0)))
    with pytest.raises(Unavailable, match="route epoch 77 is not known yet"):
        Worker(control, worker.identity, table.id, route_epoch=77).pull(deadline_ms=200)


def test_the_budget_of_the_cluster_is_the_stores(control: ControlClient) -> None:
    assert {shard.memory_budget_bytes for shard in control.status().shards} == {64 * 2**20}
    table = control.create_table(TableSchema("rows", "big", 4096, SGD(lr=1.0)))
    (worker,) = join(control, "budget", 1)
    keys = np.arange(20_000, dtype=np.uint64)
    grads = np.ones((1000, 4096), np.float32)
    parts = iter(enumerate(np.split(keys, 20), start=1))  # 320 MB of rows

    def push_all() -> None:
        for sequence, part in parts:
            control.heartbeat_worker(worker.identity)
            worker._client.push(table.id, part, grads, dim=4096, lr=1.0, sequence=sequence)

    with pytest.raises(ResourceExhausted):
        push_all()
    assert all(shard.used_bytes <= shard.memory_budget_bytes for shard in control.status().shards)
    control.drop_table("rows", "big")


def test_rows_and_requests_are_shown(control: ControlClient) -> None:
    (worker,) = join(control, "shown", 1)
    worker.push(0)
    shards = control.status().shards
    usages = [usage for shard in shards for usage in shard.tables if usage.name == "rows/shown"]
    assert sum(usage.rows for usage in usages) == len(KEYS)
    assert all(shard.requests > 0 for shard in shards)


def test_a_draining_shard_answers_what_waits_and_ends(launcher: Launcher) -> None:
    coordinator = launcher.start("coordinator", "--shards=1", "--port=0")
    address = coordinator.wait_for(r"coordinator at (\S+:\d+)")[1]
    shard = launcher.start("ps", f"--coordinator={address}", "--shard=0", "--drain=20s")
    with ControlClient(address) as control, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: control.status().ready, "the cluster to be ready")
        worker = join(control, "drained", 2)[0]
        worker.push(0)
        before = control.status().shards[0].requests
        waiting = pool.submit(worker.pull, 1, 5000)  # for rank 1, which never commits
        wait_until(lambda: control.status().shards[0].requests > before, "the pull to arrive")
        shard.signal(signal.SIGTERM)
        with pytest.raises((Unavailable, DeadlineExceeded)):
            waiting.result(DEADLINE_SEC)
        assert shard.end() == 0


def test_a_worker_that_leaves_in_order_takes_no_gradient_along(control: ControlClient) -> None:
    first, second = join(control, "orderly", 2)
    first.push(0, 1.0)
    control.deregister_worker(first.identity)
    second.push(0, 3.0)
    assert np.array_equal(second.pull(1), np.full((len(KEYS), DIM), -2.0))  # both count in their last step


def test_a_coordinator_that_was_stopped_takes_no_lease_for_it(launcher: Launcher) -> None:
    coordinator = launcher.start("coordinator", "--shards=1", "--port=0", "--worker-lease=6s", "--shard-lease=6s")
    address = coordinator.wait_for(r"coordinator at (\S+:\d+)")[1]
    shard = launcher.start("ps", f"--coordinator={address}", "--shard=0")
    with ControlClient(address, deadline_sec=30.0) as control:
        wait_until(lambda: control.status().ready, "the cluster to be ready")
        (worker,) = join(control, "stopped", 1)
        coordinator.signal(signal.SIGSTOP)
        time.sleep(9.0)  # longer than a lease
        coordinator.signal(signal.SIGCONT)
        control.heartbeat_worker(worker.identity)
        coordinator.wait_for("did not run for")
        control.heartbeat_worker(worker.identity)
        assert shard.popen.poll() is None
        assert "is lost" not in coordinator.err
