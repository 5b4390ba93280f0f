"""What a shard lacks of workers that have left, when it comes back from an older checkpoint, is counted or unknown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sparserow as sr
from sparserow.proto.control import ControlClient
from sparserow_process import DEADLINE_SEC, wait_until

pytestmark = pytest.mark.started

KEYS = np.arange(1, 41, dtype=np.uint64)
ONES = np.ones((len(KEYS), 4), np.float32)


@pytest.fixture
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2, slot_count=64, worker_lease="3s") as cluster:
        yield cluster


def shards_of(cluster: sr.LocalCluster) -> list:
    with ControlClient(cluster.address) as control:
        return list(control.status().shards)


def lost(cluster: sr.LocalCluster) -> list[tuple[int, int]]:
    """(commits lost, workers of which it is unknown) of each shard."""
    return [(shard.commits_lost, shard.losses_unknown) for shard in shards_of(cluster)]


def kill_shard(cluster: sr.LocalCluster, index: int) -> None:
    before = shards_of(cluster)[index]
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: shards_of(cluster)[index].restores > before.restores, "the shard to be back")


def save(cluster: sr.LocalCluster, folder: Path) -> None:
    """Saves as ``sparserow checkpoint save`` does, by a job of another namespace."""
    with sr.connect(cluster.address, "saves", staleness=None) as session:
        session.save(str(folder), wait=True)


def stays(cluster: sr.LocalCluster, namespace: str) -> int:
    """The number of workers in a namespace, with those that have left and of whom shards have not heard yet."""
    with ControlClient(cluster.address) as control:
        status = control.status()
        return status.leaving + sum(len(job.members) for job in status.jobs if job.namespace == namespace)


def connect(cluster: sr.LocalCluster, **options: object) -> sr.Session:
    return sr.connect(cluster.address, "rows", staleness=None, **options)


def table_of(session: sr.Session):
    return session.create_table("rows", dim=4, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))


def test_pushes_of_a_worker_that_left_are_counted_once(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    with connect(cluster) as session:
        table_of(session).push(KEYS, ONES)
    save(cluster, tmp_path)
    with connect(cluster) as session:
        table = table_of(session)
        for _ in range(60):
            table.push(KEYS, ONES)
        table.assign(KEYS[:20], ONES[:20])
        table.delete(KEYS[:20])
    wait_until(lambda: stays(cluster, "rows") == 0, "the worker to have left")
    kill_shard(cluster, 1)
    (first, second), (counted, unknown) = lost(cluster)
    assert (first, second, unknown) == (0, 0, 0)
    assert counted == 62, "each push, the assign and the delete had rows on both shards"
    kill_shard(cluster, 1)
    assert lost(cluster) == [(0, 0), (62, 0)], "the same loss counts once"
    assert [list(shard.torn_namespaces) for shard in shards_of(cluster)] == [[], ["rows"]]
    kill_shard(cluster, 0)
    assert lost(cluster) == [(62, 0), (62, 0)]
    with connect(cluster) as session:
        session.restore(str(tmp_path))
    assert [list(shard.torn_namespaces) for shard in shards_of(cluster)] == [[], []]


def test_what_a_later_checkpoint_has_is_not_lost(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    save(cluster, tmp_path)
    with connect(cluster) as session:
        for _ in range(10):
            table_of(session).push(KEYS, ONES)
    save(cluster, tmp_path)
    with connect(cluster) as session:
        table = table_of(session)
        table.push(KEYS, ONES)
        kill_shard(cluster, 1)
        assert (table.pull(KEYS) == -11).all(), "the worker that is there sends it again"
    assert lost(cluster) == [(0, 0), (0, 0)]
    assert [list(shard.torn_namespaces) for shard in shards_of(cluster)] == [[], []]


class AllRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(400, 4)


def test_steps_of_a_job_that_has_ended_are_counted(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    save(cluster, tmp_path)
    with sr.connect(cluster.address, "steps", staleness=2) as session:
        model = session.distribute(AllRows(), optimizer=sr.optim.SGD(lr=1.0), min_rows=1, carry_weights=False)
        for number in range(25):
            if number == 5:
                session.keep_rows(str(tmp_path / "rows"), every_sec=3600)
                wait_until(lambda: any((tmp_path / "rows").glob("*/manifest.json")), "a save")
            model.rows(torch.arange(400)).sum().backward()
            session.step()
    wait_until(lambda: stays(cluster, "steps") == 0, "the worker to have left")
    kill_shard(cluster, 1)
    assert lost(cluster) == [(0, 0), (20, 0)]


def test_one_rank_leaves_and_the_other_stays(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    found: list[sr.Session] = []

    def join(rank: int) -> None:
        found.append(connect(cluster, rank=rank, world_size=2))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SEC)
    first, second = sorted(found, key=lambda session: session.rank)
    table_of(first)
    save(cluster, tmp_path)
    with first:
        with second:
            for _ in range(30):
                second.table("rows").push(KEYS, ONES)
        wait_until(lambda: stays(cluster, "rows") == 1, "rank 1 to have left")
        kill_shard(cluster, 1)
        assert lost(cluster) == [(0, 0), (30, 0)]
        first.table("rows").push(KEYS, ONES)
    wait_until(lambda: stays(cluster, "rows") == 0, "rank 0 to have left")
    assert lost(cluster) == [(0, 0), (30, 0)]


def push_and_die(address: str, kind: str) -> None:
    """A worker that is killed once it has been told so."""
    session = sr.connect(address, "rows", staleness=2 if kind == "steps" else None)
    if kind == "steps":
        model = session.distribute(AllRows(), optimizer=sr.optim.SGD(lr=1.0), min_rows=1, carry_weights=False)
    for _ in range(15):
        if kind == "steps":
            model.rows(torch.arange(400)).sum().backward()
            session.step()
        else:
            table_of(session).push(KEYS, ONES)
    session.flush()
    print("done", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "order", "expected"),
    [
        ("keys", "worker first", [(0, 0), (15, 0)]),
        ("keys", "shard first", [(0, 0), (15, 1)]),  # sequences that the shard does not know, at most
        ("steps", "worker first", [(0, 0), (15, 0)]),
        ("steps", "shard first", [(0, 0), (15, 0)]),
    ],
)
def test_a_worker_that_is_killed(
    cluster: sr.LocalCluster, tmp_path: Path, kind: str, order: str, expected: list[tuple[int, int]]
) -> None:
    """Where the shard came back before the lease has ended, the other shard tells the steps, and nobody the pushes."""
    save(cluster, tmp_path)
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    worker = subprocess.Popen(
        [sys.executable, __file__, cluster.address, kind],
        env=path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdin is not None
        assert worker.stdout.readline() == "done\n"
        if order == "shard first":
            os.kill(worker.pid, signal.SIGSTOP)  # it sends nothing again
            kill_shard(cluster, 1)
            os.kill(worker.pid, signal.SIGKILL)
        else:
            worker.stdin.write("\n")
            worker.stdin.flush()
        worker.wait(DEADLINE_SEC)
        wait_until(lambda: stays(cluster, "rows") == 0, "the lease to end")
        if order == "worker first":
            kill_shard(cluster, 1)
        assert lost(cluster) == expected
    finally:
        worker.kill()


if __name__ == "__main__":
    push_and_die(*sys.argv[1:])
