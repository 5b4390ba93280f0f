"""A run whose workers torchrun starts again tells each epoch once, and its result has all epochs."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil
import pytest
from elastic_job import SAMPLES, updates, write_job
from sparserow.proto.control import ControlClient
from sparserow_process import Launcher, Process, stopped, wait_until

EPOCHS = 4
PATIENCE_SEC = 300.0
LINE = re.compile(r"epoch (\d+)/4: loss (\S+), test AUC (\S+),")


class Scene:
    """A cluster and one agent of torchrun with two workers, which lease the data of four epochs."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder
        self._up = launcher.start("up", "--shards=1", "--port=0", "--worker-lease=3s")
        self.address = self._up.wait_for(r"ready at (\S+:\d+)")[1]
        self.result = folder / "result.json"
        options = ["--standalone", "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.2"]
        train = ["train", str(write_job(folder)), "--json", str(self.result), f"--set=cluster.address={self.address}"]
        train += [f"--set=train.epochs={EPOCHS}", "--set=train.staleness=null"]
        self.agent: Process = launcher.start_torchrun(*options, arguments=train)

    def worker(self, rank: int) -> psutil.Process | None:
        """The process of a rank, once it has begun."""
        children = psutil.Process(self.agent.popen.pid).children(recursive=True)
        return next((child for child in children if child.environ().get("RANK") == str(rank)), None)

    def lines(self) -> list[tuple[int, float, float]]:
        """Number, loss and AUC of each epoch that was told so far."""
        return [(int(epoch), float(loss), float(auc)) for epoch, loss, auc in LINE.findall(self.agent.err)]

    def workers(self) -> set[int]:
        """Ranks of the job's workers whose lease has not ended."""
        with ControlClient(self.address) as control:
            jobs = [job for job in control.status().jobs if job.name == "elastic"]
        return {member.rank for job in jobs for member in job.members if member.lease_left_sec}

    def end(self) -> list[dict]:
        """Waits for the run's end; the history of its result, after each sample was counted."""
        assert self.agent.popen.wait(PATIENCE_SEC) == 0, self.agent.err
        counts = updates(self._launcher, self.address, self._folder / "rows")
        assert counts == dict.fromkeys(range(SAMPLES), EPOCHS)
        self._up.signal(signal.SIGTERM)
        assert self._up.end() == 0
        return json.loads(self.result.read_text())["history"]


@pytest.fixture
def scene(launcher: Launcher, tmp_path: Path) -> Scene:
    return Scene(launcher, tmp_path)


def check(scene: Scene, history: list[dict]) -> None:
    lines = scene.lines()
    assert [epoch for epoch, _, _ in lines] == [1, 2, 3, 4], scene.agent.err
    assert [epoch["epoch"] for epoch in history] == [1, 2, 3, 4]
    for (_, loss, auc), epoch in zip(lines, history, strict=True):
        assert epoch["train_loss"] == pytest.approx(loss, abs=1e-4)
        assert epoch["test_auc"] == pytest.approx(auc, abs=1e-4)
        assert 0 < loss < 0.8
        assert 0.5 < auc < 0.95
        assert epoch["samples_per_sec"] > 0
        assert epoch["samples"] == SAMPLES


def test_worker_0_is_killed_in_an_epoch(scene: Scene) -> None:
    wait_until(lambda: len(scene.lines()) == 2, "two epochs", PATIENCE_SEC)
    victim = scene.worker(0)
    assert victim is not None
    victim.kill()
    check(scene, scene.end())


def test_a_worker_is_killed_when_all_is_trained_and_told(scene: Scene) -> None:
    wait_until(lambda: scene.workers() == {0, 1}, "both workers", PATIENCE_SEC)
    wait_until(lambda: len(scene.lines()) >= 1, "the first epoch", PATIENCE_SEC)
    last = scene.worker(1)
    assert last is not None
    with stopped([last.pid]):
        wait_until(scene.result.exists, "worker 0 to end alone", PATIENCE_SEC)
        before = json.loads(scene.result.read_text())["history"]
        last.kill()
    history = scene.end()
    assert history == before
    check(scene, history)
    assert f"all {EPOCHS} epochs" in scene.agent.err
