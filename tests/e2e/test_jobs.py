"""Workers join, agree, leave and are fenced, through the real services and data-plane servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from sparserow.deploy.launch.local_cluster import LocalCluster, local_cluster
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import DeadlineExceeded, FailedPrecondition, Fenced
from sparserow.proto.optim import Adagrad
from sparserow.proto.schema import TableSchema
from sparserow.proto.worker_identity import WorkerIdentity
from sparserow_process import DEADLINE_SEC, wait_until

LEASE_SEC = 6.0  # a thread that renews one may have no CPU for a while


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(shards=2, worker_lease=LEASE_SEC) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[ControlClient]:
    with ControlClient(cluster.address) as connected:
        yield connected


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


Join = Callable[..., "Future[WorkerIdentity]"]


@pytest.fixture
def join(client: ControlClient, pool: ThreadPoolExecutor) -> Join:
    def start(job: str, rank: int, world_size: int = 2, **terms: object) -> Future[WorkerIdentity]:
        arguments = {"namespace": "ads", "job": job, "rank": rank, "world_size": world_size, "deadline_sec": 30.0}
        return pool.submit(lambda: client.register_worker(**{**arguments, **terms}))

    return start


def members(client: ControlClient, job: str) -> list[int]:
    return [member.rank for status in client.status().jobs if status.name == job for member in status.members]


def test_a_job_starts_when_every_rank_has_come(client: ControlClient, join: Join) -> None:
    first = join("all", 1)
    wait_until(lambda: members(client, "all") == [1], "rank 1 to wait")
    assert not first.done()
    second = join("all", 0)
    identities = [second.result(DEADLINE_SEC), first.result(DEADLINE_SEC)]
    assert identities[0].job_id == identities[1].job_id
    assert identities[0].worker_id != identities[1].worker_id
    assert {identity.first_step for identity in identities} == {0}
    assert identities[0].lease_sec == LEASE_SEC


def test_the_late_are_named_and_may_try_again(client: ControlClient, join: Join) -> None:
    with pytest.raises(DeadlineExceeded, match=r"1 of 3 ranks of job ads/late came .*; rank 2 waited for ranks 0, 1"):
        join("late", 2, 3, deadline_sec=10.0).result(DEADLINE_SEC)
    wait_until(lambda: members(client, "late") == [], "the candidate to be withdrawn")
    joined = [join("late", rank, 3) for rank in range(3)]
    assert len({future.result(DEADLINE_SEC).worker_id for future in joined}) == 3


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"world_size": 3}, "world_size is 2 for rank 0 and 3 for rank 1"),
        ({"staleness": None}, "staleness is 0 for rank 0 and None for rank 1"),
        ({"grad_scale": "sum"}, "grad_scale is 'mean' for rank 0 and 'sum' for rank 1"),
    ],
)
def test_workers_must_agree(client: ControlClient, join: Join, terms: dict[str, object], words: str) -> None:
    job = f"agree-{next(iter(terms))}"
    first = join(job, 0)
    wait_until(lambda: members(client, job) == [0], "rank 0 to wait")
    with pytest.raises(FailedPrecondition, match=words):
        join(job, 1, **{"world_size": 2, **terms}).result(DEADLINE_SEC)
    join(job, 1).result(DEADLINE_SEC)
    first.result(DEADLINE_SEC)


def test_a_worker_that_is_silent_leaves_and_is_fenced(client: ControlClient, join: Join) -> None:
    identities = [future.result(DEADLINE_SEC) for future in (join("silent", 0), join("silent", 1))]
    stop = threading.Event()

    def keep_alive() -> None:
        while not stop.wait(0.1):
            with contextlib.suppress(DeadlineExceeded):  # the next one is in time
                client.heartbeat_worker(identities[0], step=3)

    beating = threading.Thread(target=keep_alive)
    beating.start()
    try:
        wait_until(lambda: members(client, "silent") == [0], "the silent rank to leave")
        with pytest.raises(Fenced, match=r"not a member of job ads/silent: its lease has ended"):
            client.heartbeat_worker(identities[1])
        client.heartbeat_worker(identities[0])
    finally:
        stop.set()
        beating.join(DEADLINE_SEC)
    client.deregister_worker(identities[0])
    client.deregister_worker(identities[0])
    assert members(client, "silent") == []


def test_a_rank_that_comes_again_fences_the_old_one(client: ControlClient, join: Join) -> None:
    old = join("again", 0, 1).result(DEADLINE_SEC)
    new = join("again", 0, 1).result(DEADLINE_SEC)
    assert (new.worker_id, new.epoch) == (old.worker_id, old.epoch + 1)
    with pytest.raises(Fenced):
        client.heartbeat_worker(old)
    client.deregister_worker(old)
    client.heartbeat_worker(new)


def test_a_waiting_rank_that_comes_again_is_fenced(client: ControlClient, join: Join) -> None:
    first = join("twice", 0)
    wait_until(lambda: members(client, "twice") == [0], "rank 0 to wait")
    second = join("twice", 0)
    with pytest.raises(Fenced):
        first.result(DEADLINE_SEC)
    third = join("twice", 1)
    assert second.result(DEADLINE_SEC).epoch == 2
    assert third.result(DEADLINE_SEC).epoch == 1


def test_a_table_is_created_once_by_many(client: ControlClient, pool: ThreadPoolExecutor) -> None:
    schema = TableSchema("ads", "shared", 8, Adagrad())
    made = list(pool.map(lambda _: client.create_table(schema), range(8)))
    assert len({table.id for table in made}) == 1
    assert [len(shard.tables) for shard in client.status().shards] == [1, 1]
    with pytest.raises(FailedPrecondition, match=r"table ads/shared exists with dim 8, the request says 16"):
        client.create_table(TableSchema("ads", "shared", 16, Adagrad()))
