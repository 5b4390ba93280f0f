"""A worker that was not heard for a lease keeps its place until something waits for it, and then is told so."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from sparserow.proto.control import ControlClient
from sparserow.worker.membership.lease import Lease
from sparserow_process import wait_until

LEASE_SEC = 1.5
KEYS = np.arange(1, 9, dtype=np.uint64)


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2, worker_lease=LEASE_SEC, slot_count=64) as cluster:
        yield cluster


class Silence:
    """Holds up the heartbeats of sessions that are opened within it, as a process that gets no CPU does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ended = threading.Event()
        of_before = ControlClient.heartbeat_worker

        def held_up(control: ControlClient, identity: object, **options: object) -> object:
            if threading.current_thread() in self.threads:
                self._ended.wait(60)
            return of_before(control, identity, **options)  # type: ignore[arg-type]

        self.threads: list[threading.Thread] = []
        monkeypatch.setattr(ControlClient, "heartbeat_worker", held_up)

    def holds_up(self, session: sr.Session) -> None:
        """Holds up the heartbeats of a session."""
        on_close = session.core._on_close
        lease = getattr(on_close, "__self__", None)
        assert isinstance(lease, Lease)
        self.threads.append(lease._thread)

    def end(self) -> None:
        """Lets the heartbeats go on."""
        self._ended.set()


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silence]:
    silence = Silence(monkeypatch)
    yield silence
    silence.end()


def connect(cluster: sr.LocalCluster, namespace: str, **options: object) -> sr.Session:
    return sr.connect(cluster.address, namespace, **{"staleness": None, "deadline_sec": 20.0, **options})


def pushed(session: sr.Session) -> None:
    table = session.create_table("t", dim=2, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
    table.push(KEYS, np.ones((len(KEYS), 2), np.float32))


def members(cluster: sr.LocalCluster, namespace: str) -> int:
    with ControlClient(cluster.address) as control:
        return sum(len(job.members) for job in control.status().jobs if job.namespace == namespace)


def test_one_for_which_nothing_waits_goes_on_after_its_lease(cluster: sr.LocalCluster, silence: Silence) -> None:
    with connect(cluster, "alone") as session:
        pushed(session)
        silence.holds_up(session)
        time.sleep(1.8 * LEASE_SEC)
        assert members(cluster, "alone") == 1
        pushed(session)
        silence.end()
        time.sleep(2 * LEASE_SEC)
        assert members(cluster, "alone") == 1, "its lease runs again"
        pushed(session)


def test_after_three_leases_its_calls_are_fenced(cluster: sr.LocalCluster, silence: Silence) -> None:
    with connect(cluster, "silent") as session:
        pushed(session)
        silence.holds_up(session)
        began = time.monotonic()
        wait_until(lambda: members(cluster, "silent") == 0, "the lease to end")
        assert time.monotonic() - began > 2 * LEASE_SEC
        # A shard hears that a worker has left before it hears that its job is over, and either is an answer.
        words = r"(is over: all its workers have left, or their leases have|or its lease has) ended .worker_lease of"
        with pytest.raises(sr.errors.Fenced, match=words):
            pushed(session)
        with pytest.raises(sr.errors.Fenced, match=r"its lease has ended \(worker_lease: 1\.5 s, three times as long"):
            session.save("/nowhere", wait=True)


def drops(cluster: sr.LocalCluster, folder: Path) -> None:
    with ControlClient(cluster.address) as control:
        control.drop_tables("waited", ["t"], only_unused=True)


def restores(cluster: sr.LocalCluster, folder: Path) -> None:
    with connect(cluster, "waited", job="another") as session:
        session.restore(str(folder))


def registers(cluster: sr.LocalCluster, folder: Path) -> None:
    with connect(cluster, "waited", staleness=3) as session:
        assert session.current_step == 0


@pytest.mark.parametrize("waits", [drops, restores, registers])
def test_it_leaves_when_something_waits_for_it(
    cluster: sr.LocalCluster, silence: Silence, tmp_path: Path, waits: Callable[[sr.LocalCluster, Path], None]
) -> None:
    with connect(cluster, "waited") as session:
        pushed(session)
        session.save(str(tmp_path), wait=True)
        silence.holds_up(session)
        if waits is drops:
            with pytest.raises(sr.errors.FailedPrecondition, match="waited may use its tables"):
                waits(cluster, tmp_path)
        time.sleep(1.4 * LEASE_SEC)
        assert members(cluster, "waited") == 1
        waits(cluster, tmp_path)
        with pytest.raises(sr.errors.Fenced, match=r"left job|is over"):
            pushed(session)


def test_another_worker_whose_step_needs_it_waits_a_lease_alone(cluster: sr.LocalCluster, silence: Silence) -> None:
    """As the former rule was: the survivor's pull of the next step goes on when the lease has ended."""
    from sparserow_process import DEADLINE_SEC

    script = (
        "import os, sys, torch, sparserow as sr\n"
        "rank = int(sys.argv[2])\n"
        "session = sr.connect(sys.argv[1], 'pair', rank=rank, world_size=2, staleness=1, gather_sec=60)\n"
        "model = session.distribute(torch.nn.Sequential(torch.nn.EmbeddingBag(100, 4)), min_rows=1,\n"
        "                      optimizer=sr.optim.SGD(lr=1.0), carry_weights=False)\n"
        "for step in range(8):\n"
        "    if rank == 1 and step == 3:\n"
        "        os._exit(9)\n"
        "    model(torch.tensor([[1, 2]])).sum().backward()\n"
        "    session.step()\n"
        "session.close()\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, cluster.address, str(rank)], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    assert ranks[1].wait(DEADLINE_SEC) == 9
    began = time.monotonic()
    errors = ranks[0].communicate(timeout=DEADLINE_SEC)[1].decode()
    assert ranks[0].returncode == 0, errors
    print(f"the survivor ended {time.monotonic() - began:.1f} s later")
