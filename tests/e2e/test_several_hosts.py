"""A cluster on hosts of their own, with TLS and tokens: cables are pulled, packets are lost, machines die.

Workers' commits take one from each row, so rows tell how many commits a shard has applied: exactly those that were
acknowledged, but for what the coordinator counts as lost of a shard that died.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hosts as network
import sparserow as sr
from long_form import FULL
from sparserow.cpp_ext import _server
from sparserow.deploy.launch.security_files import add_token, init_security
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import SparserowError
from sparserow.proto.process.whole_file import write_whole
from sparserow.proto.security.security import Security
from sparserow_process import Launcher, Process, wait_until

pytestmark = pytest.mark.skipif(network.why_not() != "", reason=network.why_not() or "")

ROWS, CUT_SEC, LEASE = 300, 10.0, "6s"
KEYS = np.arange(ROWS, dtype=np.uint64)
NAMES = ("control", "ps0", "ps1", "worker0", "worker1", "serve")


class Field:
    """The processes on their hosts."""

    def __init__(self, launcher: Launcher, hosts: dict[str, network.Host], folder: Path) -> None:
        self.launcher, self.hosts, self.folder = launcher, hosts, folder
        addresses = [host.address for host in hosts.values()]
        self.security = init_security(folder / "security", addresses, valid_sec=3600)
        for role in ("train", "serve-read"):
            token = add_token(folder / "security" / "tokens.yaml", role, role, ())
            write_whole(folder / "security" / f"{role}.token", token, mode=0o600)
            (folder / "security" / f"{role}.yaml").write_text(f"ca: ca.pem\ntoken_file: {role}.token\n")
        self.coordinator = f"{hosts['control'].address}:7000"
        self.stop_file, self.kept = folder / "stop", folder / "kept"
        self.workers: list[Process] = []

    def server(self, host: str, *arguments: str) -> Process:
        """A server that listens on every address of its host."""
        security = f"--security={self.security}"
        return self.launcher.start(security, *arguments, "--host=0.0.0.0", within=self.hosts[host].within)

    def start_cluster(self) -> None:
        leases = (f"--worker-lease={LEASE}", f"--shard-lease={LEASE}", "--slot-count=64")
        told = f"--advertise={self.hosts['control'].address}"
        root = f"--checkpoint-root={self.kept}"
        coordinator = self.server("control", "coordinator", "--shards=2", *leases, told, root)
        coordinator.wait_for(f"coordinator at {re.escape(self.coordinator)}")
        for shard in (0, 1):
            self.start_shard(shard)

    def start_shard(self, shard: int) -> Process:
        """It waits for its place while the lease of its former process runs."""
        arguments = ("ps", f"--coordinator={self.coordinator}", f"--shard={shard}", "--port=7001")
        process = self.server(f"ps{shard}", *arguments)
        begun = process.wait_for(r"rows are served at (\S+)")
        assert begun[1] == f"{self.hosts[f'ps{shard}'].address}:7001"
        return process

    def start_worker(self, rank: int, staleness: str) -> None:
        process = self.launcher.start_script(
            "counting_worker.py",
            *(self.coordinator, str(self.security.with_name("train.yaml")), str(rank), "2", staleness, str(ROWS)),
            *(str(self.stop_file), str(self.kept)),
            within=self.hosts[f"worker{rank}"].within,
        )
        self.workers.append(process)

    def start_serving(self) -> str:
        follow = f"--follow={self.coordinator}"
        process = self.server("serve", "serve", "--model=live", follow, "--namespace=hosts", "--port=7100")
        return process.wait_for(r"ready at gRPC (\S+:7100)")[1]

    def control(self) -> ControlClient:
        return ControlClient(self.coordinator, security=Security.load(self.security))

    def is_ready(self) -> bool:
        """Whether all shards serve, as the coordinator sees it."""
        with self.control() as control:
            return bool(control.status().ready)

    def acknowledged(self) -> list[int]:
        """Of each worker, commits that every shard has answered."""
        return [max(map(int, re.findall(r"acknowledged (\d+)", worker.out)), default=0) for worker in self.workers]

    def wait_for_steps(self, more: int = 20) -> None:
        """Waits until every worker has had so many more commits acknowledged."""
        before = self.acknowledged()

        def moved() -> bool:
            for worker in self.workers:
                assert worker.popen.poll() is None, worker.err
            return all(now >= was + more for now, was in zip(self.acknowledged(), before, strict=True))

        wait_until(moved, f"{more} more steps of each worker; {before}, {[w.err[-300:] for w in self.workers]}", 600)

    def finish(self) -> int:
        """Commits that were acknowledged to the workers."""
        self.stop_file.touch()
        ends = [worker.wait_for(r"done (\d+)") for worker in self.workers]
        for worker in self.workers:
            assert worker.end() == 0, worker.err
        return sum(int(end[1]) for end in ends)

    def saves(self) -> int:
        return len(files.list_names(Folder(str(self.kept))))


class Reader:
    """Looks rows up all the time, and counts how often they came in time."""

    def __init__(self, client: sr.ServingClient) -> None:
        self._client = client
        self._ended = threading.Event()
        self.answers, self.failures = 0, []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._ended.wait(0.05):
            try:
                self._client.lookup("rows", KEYS[:10], deadline_ms=5000)
                self.answers += 1
            except SparserowError as error:
                self.failures.append(error)

    def end(self) -> None:
        self._ended.set()
        self._thread.join(60)


@pytest.fixture
def field(launcher: Launcher, tmp_path: Path) -> Iterator[Field]:
    with network.hosts(*NAMES) as hosts:
        yield Field(launcher, hosts, tmp_path)


@pytest.mark.parametrize("staleness", ["4", "none", "0"] if FULL else ["4"])
def test_cables_packets_and_machines(field: Field, staleness: str) -> None:
    """Of a synchronous job no machine dies here: all its workers go back to a checkpoint then."""
    is_synchronous = staleness == "0"
    field.start_cluster()
    for rank in (0, 1):
        field.start_worker(rank, staleness)
    for worker in field.workers:
        wait_until(lambda worker=worker: "joined" in worker.out or worker.popen.poll() is not None, "a worker", 600)
        worker.wait_for("joined")
    reader_file = field.security.with_name("serve-read.yaml")
    with sr.ServingClient(field.start_serving(), security=reader_file) as client:
        reader = Reader(client)
        field.wait_for_steps()

        is_lossy = [host.lose(1) for host in field.hosts.values()]
        field.wait_for_steps()

        field.hosts["ps1"].cut()
        time.sleep(CUT_SEC)  # longer than every lease
        field.hosts["ps1"].mend()
        field.wait_for_steps()

        if not is_synchronous:
            wait_until(lambda: field.saves() >= 1, "rows that are kept")
            field.hosts["ps0"].crash()
            time.sleep(1.0)
            field.hosts["ps0"].mend()
            field.start_shard(0)
            field.wait_for_steps()

        reader.end()
        assert reader.answers > 0
        assert not reader.failures, reader.failures[:3]
        died = _worker_and_serving_die(field, staleness) if FULL and not is_synchronous else 0
        taken = field.finish() + died
        wait_until(field.is_ready, "the shard whose cable was out to be told what it missed")
        rows = rows_of(field)
        counts = -rows[:, 0].astype(int)
        with field.control() as control:
            status = control.status().shards
            view = control.cluster()
            table_id = control.list_tables("hosts")[0].id
        owners = view.slot_owner[_server.slots_of(table_id, KEYS, view.slot_count)]
        lost = [shard.commits_lost for shard in status]
        print(f"acknowledged {taken}, lost {lost}, rows {sorted(set(counts))}, lookups {reader.answers}")
        assert [shard.restores for shard in status] == ([0, 0] if is_synchronous else [1, 0])
        assert lost == [0, 0], "of the shard that died, workers that live hold what was not saved"
        for shard in (0, 1):
            assert set(counts[owners == shard]) <= ({taken, taken + 1} if FULL else {taken}), f"shard {shard}"
        assert len(set(counts)) == 1, "a commit is applied on all shards or on none"
        if all(is_lossy):
            assert sum(host.lost() for host in field.hosts.values()) > 0
        wait_until(lambda: np.array_equal(client.lookup("rows", KEYS).rows, rows), "serving to have the last rows")


def rows_of(field: Field) -> np.ndarray:
    train = field.security.with_name("train.yaml")
    with sr.connect(field.coordinator, "hosts", job="reader", staleness=None, security=train) as session:
        return session.table("rows").pull(KEYS)


def _worker_and_serving_die(field: Field, staleness: str) -> int:
    """Both come back on machines that were started anew.

    Returns:
        Commits that the dead worker knew to be done; of one more it had no answer yet.
    """
    died = field.workers.pop()
    field.hosts["worker1"].crash()
    field.hosts["serve"].crash()
    field.wait_for_steps()  # of the other, once the lease of the dead one has ended
    for name in ("worker1", "serve"):
        field.hosts[name].mend()
    field.start_worker(1, staleness)
    field.workers[-1].wait_for("joined")
    field.start_serving()
    field.wait_for_steps()
    return max(map(int, re.findall(r"acknowledged (\d+)", died.out)))
