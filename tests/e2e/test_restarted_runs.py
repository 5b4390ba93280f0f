"""A run whose workers torchrun starts again tells each epoch once, and its result has all epochs."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

from elastic_job import SAMPLES, updates, write_job
from sparserow.proto.control import ControlClient
from sparserow_process import Launcher, Process, stopped, wait_until

EPOCHS = 4
PATIENCE_SEC = 300.0
ALONE_SEC = 150.0  # less than the deadline of the test, so that it can say how things stand
LINE = re.compile(r"epoch (\d+)/4: loss (\S+), (?:not tested|test AUC (\S+)),")


def worker(agent: Process, rank: int) -> psutil.Process | None:
    """The process of a rank, once it has begun and until it ends."""
    for child in psutil.Process(agent.popen.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.environ().get("RANK") == str(rank):
                return child
    return None


def lines(agent: Process) -> list[tuple[int, float, float | None]]:
    """Number, loss and AUC of each epoch that its workers told so far; None as the AUC of one that was not tested."""
    return [(int(epoch), float(loss), float(auc) if auc else None) for epoch, loss, auc in LINE.findall(agent.err)]


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
        return worker(self.agent, rank)

    def lines(self) -> list[tuple[int, float, float | None]]:
        """Number, loss and AUC of each epoch that was told so far."""
        return lines(self.agent)

    def joined(self) -> dict[int, tuple[int, int]]:
        """The worker id and the epoch of each rank that has joined and not left."""
        with ControlClient(self.address) as control:
            return {it.rank: (it.worker_id, it.epoch) for job in control.status().jobs for it in job.members}

    def states(self) -> list[str]:
        """The job as its coordinator has it, and what the processes of the agent do."""
        with ControlClient(self.address) as control:
            found = [str(job) for job in control.status().jobs]
        for child in psutil.Process(self.agent.popen.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                rank = child.environ().get("RANK")
                found.append(f"process {child.pid} of rank {rank}: {child.status()}, {child.num_threads()} threads")
        return found

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


def check(agent: Process, history: list[dict], *, untested: Collection[int] = ()) -> None:
    """Checks what was told and the result; the epochs in ``untested`` may be without a test."""
    told = lines(agent)
    assert [epoch for epoch, _, _ in told] == [1, 2, 3, 4], agent.err
    assert [epoch["epoch"] for epoch in history] == [1, 2, 3, 4]
    for (_, loss, auc), epoch in zip(told, history, strict=True):
        assert epoch["train_loss"] == pytest.approx(loss, abs=1e-4)
        assert 0 < loss < 0.8
        if auc is None:
            assert epoch["epoch"] in untested
            assert epoch["test_auc"] is None
        else:
            assert epoch["test_auc"] == pytest.approx(auc, abs=1e-4)
            assert 0.5 < auc < 0.95
        assert epoch["samples_per_sec"] > 0
        assert epoch["samples"] == SAMPLES


@pytest.mark.started
def test_workers_are_killed_in_an_epoch_and_when_all_is_told(scene: Scene) -> None:
    wait_until(lambda: len(scene.lines()) == 2, "two epochs", PATIENCE_SEC)
    victim, joined = scene.worker(0), scene.joined()
    assert victim is not None
    assert joined.keys() == {0, 1}
    victim.kill()
    wait_until(lambda: scene.joined().keys() == {0, 1} and set(joined.values()).isdisjoint(scene.joined().values()),
               "the next workers to join", PATIENCE_SEC)  # fmt: skip
    last = scene.worker(1)
    assert last is not None
    # It is held as soon as both train, because it would end when nothing is left, which may be before worker 0 says so.
    with stopped([last.pid]):
        try:
            wait_until(scene.result.exists, "worker 0 to end alone", ALONE_SEC)
        except AssertionError:
            print("held:", last.pid, "at the time:", *scene.states(), sep="\n")
            raise
        before = json.loads(scene.result.read_text())["history"]
        last.kill()
    history = scene.end()
    assert history == before
    # The other worker may train on all that is left of epoch 3 before the next worker 0 asks for data.
    check(scene.agent, history, untested=[3])
    assert f"all {EPOCHS} epochs" in scene.agent.err


@pytest.mark.started
@pytest.mark.full
def test_workers_that_go_back_to_a_checkpoint_tell_no_epoch_again(launcher: Launcher, tmp_path: Path) -> None:
    """The checkpoint is of epoch 2, of which worker 0 has told when it is killed; then the run is started once more."""
    result = tmp_path / "result.json"
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=ads", "--nnodes=1"]
    options += ["--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.2", "--local-addr=127.0.0.1"]
    sets = [f"train.epochs={EPOCHS}", "train.staleness=0", "train.dense=ddp", "train.elastic=null"]
    sets += [f"train.checkpoint={{url: {tmp_path / 'saves'}, every_steps: 150}}", "cluster.worker_lease=20s"]
    train = ["train", str(write_job(tmp_path)), "--json", str(result), "--resume=auto"]
    train += [f"--set={each}" for each in sets]
    agent = launcher.start_torchrun(*options, arguments=train)
    wait_until(lambda: len(lines(agent)) == 2, "two epochs", PATIENCE_SEC)
    victim = worker(agent, 0)
    assert victim is not None
    victim.kill()
    assert agent.popen.wait(PATIENCE_SEC) == 0, agent.err
    assert re.search(r"resumed from \S+, step \d+, in epoch 2\n", agent.err), agent.err
    history = json.loads(result.read_text())["history"]
    check(agent, history)
    result.unlink()
    again = launcher.start_torchrun(*options, arguments=train)
    assert again.popen.wait(PATIENCE_SEC) == 0, again.err
    assert lines(again) == []
    assert f"all {EPOCHS} epochs" in again.err
    assert json.loads(result.read_text())["history"] == history
