"""Agents of torchrun that come and go: the world changes, the servers stay, each sample of the epoch is trained on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from elastic_job import LEASE_ROWS, SAMPLES, updates, write_job
from held_data import HeldData
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.config.job import JobConfig
from sparserow.proto.control import ControlClient
from sparserow.proto.options.document import load_config
from sparserow.worker.training.job_readers import open_readers
from sparserow.worker.training.process_group import WorkerGroup
from sparserow_process import Launcher, Process, free_port, wait_until

CHUNKS = SAMPLES // LEASE_ROWS
PATIENCE_SEC = 300.0


class Scene:
    """A cluster, and agents of torchrun that train the job on it; the first one is where they meet."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder
        self._port = free_port()
        self._job = write_job(folder)
        launcher.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # docs/train-your-model.md says why
        self._up = launcher.start("up", "--shards=2", "--port=0", "--worker-lease=10s")
        self.address = self._up.wait_for(r"ready at (\S+:\d+)")[1]
        self._servers = self._server_pids()

    def _server_pids(self) -> set[int]:
        return {process.pid for process in self._launcher.by_role()["shard"]}

    def hold(self, held: int) -> HeldData:
        """Keeps the epoch from ending."""
        readers = open_readers(load_config(JobConfig, self._job), WorkerGroup(meets=False))
        order = readers.train.digest(LEASE_ROWS)
        return HeldData(self.address, job="elastic", run="ads", chunks=CHUNKS, held=held, order=order)

    def agent(self, name: str, *arguments: str, nodes: str = "1:2", restarts: int = 3) -> Process:
        """Starts an agent of one worker; agent ``a`` is where they meet."""
        options = [f"--nnodes={nodes}", "--nproc-per-node=1", f"--max-restarts={restarts}", "--monitor-interval=0.2"]
        options += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=ads"]
        options += [f"--rdzv-conf=is_host={int(name == 'a')},last_call_timeout=1", "--local-addr=127.0.0.1"]
        train = ["train", str(self._job), "--json", str(self.result(name)), f"--set=cluster.address={self.address}"]
        train += ["--set=train.epochs=1", "--set=train.staleness=null", *arguments]
        return self._launcher.start_torchrun(*options, arguments=train)

    def result(self, name: str) -> Path:
        """Where the first worker of an agent's writes what came out."""
        return self._folder / f"{name}.json"

    def highest_step(self) -> int:
        """That a worker of the job has committed; -1 before the first."""
        with ControlClient(self.address) as control:
            return max((job.highest_step for job in control.status().jobs if job.name == "elastic"), default=-1)

    def end(self) -> dict[int, int]:
        """Ends the cluster, whose shards are those of the beginning; how often each sample was trained on."""
        assert self._server_pids() == self._servers
        counts = updates(self._launcher, self.address, self._folder / "rows")
        self._up.signal(signal.SIGTERM)
        assert self._up.end() == 0
        return counts


@pytest.fixture
def scene(launcher: Launcher, tmp_path: Path) -> Scene:
    return Scene(launcher, tmp_path)


def kill(agent: Process) -> None:
    """An agent and its worker, as when their host is gone."""
    process = psutil.Process(agent.popen.pid)
    for each in [process, *process.children(recursive=True)]:
        each.kill()
    agent.end()


def wait_for_later(data: HeldData, before: dict[int, int], what: str) -> None:
    """Until all these ranks are workers that have registered after those."""

    def have_come() -> bool:
        now = data.workers()
        return all(now.get(rank, 0) > epoch for rank, epoch in before.items())

    wait_until(have_come, what, PATIENCE_SEC)


def test_one_of_two_agents_is_killed(scene: Scene) -> None:
    with scene.hold(CHUNKS * 3 // 4) as data:
        stays, goes = scene.agent("a"), scene.agent("b")
        wait_until(lambda: set(data.workers()) == {0, 1}, "both workers", PATIENCE_SEC)
        data.release(CHUNKS // 4)  # so that the one that is killed may be at work
        kill(goes)
        data.release(CHUNKS // 2)
        wait_until(scene.result("a").exists, "the other one to end the epoch", PATIENCE_SEC)
    assert 0.8 < json.loads(scene.result("a").read_text())["test_auc"] < 0.95
    stays.signal(signal.SIGTERM)  # it would wait for the other agent, five minutes
    stays.popen.wait(PATIENCE_SEC)
    assert scene.end() == dict.fromkeys(range(SAMPLES), 1)


@pytest.mark.full
def test_an_agent_joins_one_is_killed_and_another_takes_its_place(scene: Scene) -> None:
    with scene.hold(CHUNKS * 3 // 4) as data:
        first = scene.agent("a")
        wait_until(lambda: data.workers().get(0, 0) > 1, "the first worker", PATIENCE_SEC)
        joins = scene.agent("b")
        wait_for_later(data, {0: data.workers()[0], 1: 0}, "a world of two")
        data.release(CHUNKS // 4)
        before = data.workers()
        kill(joins)
        replaces = scene.agent("c")
        wait_for_later(data, before, "a world of two again")
        data.release(CHUNKS // 2)
        assert first.popen.wait(PATIENCE_SEC) == 0, first.err
        assert replaces.popen.wait(PATIENCE_SEC) == 0, replaces.err
    assert scene.end() == dict.fromkeys(range(SAMPLES), 1)


@pytest.mark.full
def test_all_agents_are_killed_and_another_number_of_them_goes_back_to_a_save(scene: Scene, tmp_path: Path) -> None:
    url = tmp_path / "saves"
    arguments = (f"--set=train.elastic={{lease_rows: {LEASE_ROWS}, url: {url}, save_every: 0.2s}}", "--resume=auto")
    both = [scene.agent(name, *arguments, nodes="2") for name in ("a", "b")]
    wait_until(lambda: scene.highest_step() >= 20, "the first steps", PATIENCE_SEC)
    known = files.list_names(Folder(str(url)))[-1:]
    wait_until(lambda: files.list_names(Folder(str(url)))[-1:] > known, "a save of them", PATIENCE_SEC)
    for agent in both:
        kill(agent)
    again = scene.agent("a", *arguments, nodes="1")
    assert again.popen.wait(PATIENCE_SEC) == 0, again.err
    assert json.loads(scene.result("a").read_text())["history"][0]["samples"] == SAMPLES, "with those before the save"
    assert scene.end() == dict.fromkeys(range(SAMPLES), 1)


@pytest.mark.full
def test_the_faults_of_workers_of_two_agents_are_told_in_one_place(scene: Scene, tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    lines = (tmp_path / "train.csv").read_text().splitlines()
    bad.write_text("\n".join([*lines, "1,2"]) + "\n")
    agents = [scene.agent(name, f"--set=data.train={bad}", nodes="2", restarts=0) for name in ("a", "b")]
    for agent in agents:
        assert agent.popen.wait(PATIENCE_SEC) == 1
    with ControlClient(scene.address) as control:
        wait_until(lambda: len(control.list_faults()) == 2, "both workers' faults", PATIENCE_SEC)
        faults = control.list_faults()
    assert [fault.incident for fault in faults] == [1, 1]
    assert {fault.rank for fault in faults} == {0, 1}
    first = faults[0]
    assert (first.job, first.echo) == ("elastic", False)
    for part in ("Traceback (most recent call last)", f"bad.csv, line {SAMPLES + 1}"):
        assert part in first.traceback
    told = "".join(agent.err for agent in agents)
    assert "Root Cause" in told
