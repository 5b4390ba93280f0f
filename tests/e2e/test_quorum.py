"""A job with a quorum, with real processes: each step has its members on every shard, also when a worker is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorum_worker import KEYS_A_STEP, SIDE, keys_of
from sparserow.cpp_ext import _client
from sparserow.deploy.launch.local_cluster import LocalCluster, local_cluster
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.checkpoint.manifest import list_names
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import error_of
from sparserow.proto.names import id_of_name
from sparserow.worker.data import write_click_log
from sparserow.worker.data.synthetic import SyntheticLog
from sparserow.worker.layers.dense_rows import MARKER_KEY
from sparserow_process import DEADLINE_SEC, Launcher, Process, run_ranks, wait_until

SCRIPT = Path(__file__).parents[1] / "support" / "quorum_worker.py"
JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"
WORKERS, QUORUM, STEPS, SHARDS = 3, 2, 60, 2
SAMPLES, BATCH = 20_000, 128  # of a train job
BATCHES = -(-SAMPLES // (WORKERS * BATCH))  # of each worker in an epoch


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    _client.set_error_factory(error_of)
    with local_cluster(shards=SHARDS, worker_lease=3.0) as running:
        yield running


@contextmanager
def team(
    cluster: LocalCluster, pauses_ms: list[int], *, cache_bytes: int = 0, hold: int = 0, die_at: int = -1
) -> Iterator[list[subprocess.Popen[str]]]:
    """Workers that begin their steps together; the last one is held up, and the one before it dies."""
    numbers = [
        (rank, WORKERS, QUORUM, STEPS, pause, cache_bytes, hold * (rank == 2), die_at if rank == 1 else -1)
        for rank, pause in enumerate(pauses_ms)
    ]
    workers = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), cluster.address, *map(str, each)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in numbers
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def report_of(worker: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = worker.communicate(timeout=DEADLINE_SEC)
    assert worker.returncode == 0
    report: dict[str, Any] = json.loads(out)
    return report


class Shards:
    """The rows of the job, shard by shard, as they are."""

    def __init__(self, cluster: LocalCluster) -> None:
        with ControlClient(cluster.address) as control:
            view = control.cluster()
        client = _client.Client(
            shards=[(shard.host, shard.port) for shard in view.shards],
            slot_owner=view.slot_owner,
            route_epoch=view.route_epoch,
            cluster_id=view.cluster_id,
        )
        self.traces: list[dict[int, float]] = []
        self.dense: list[np.ndarray] = []
        for shard in range(SHARDS):
            pages = list(client.scan(id_of_name("quorum/trace"), shard=shard))
            self.traces.append(
                {int(key): float(row[0]) for keys, _, _, rows, _ in pages for key, row in zip(keys, rows, strict=True)}
            )
            dense = client.scan(id_of_name("quorum/dense"), shard=shard)
            self.dense.append(np.concatenate([rows[keys != MARKER_KEY] for keys, _, _, rows, _ in dense]))

    def members(self, step: int) -> list[set[int]]:
        """By shard, the workers whose gradients of a step it has applied. A shard has rows that were changed alone."""
        members: list[set[int]] = [set() for _ in range(SHARDS)]
        for rank in range(WORKERS):
            applied = [[trace[key] for key in keys_of(rank, step, STEPS) if key in trace] for trace in self.traces]
            assert sum(map(len, applied)) in (0, KEYS_A_STEP), "the whole of a gradient, or nothing"
            for shard, rows in enumerate(applied):
                assert set(rows) <= {-1.0 / QUORUM}, "divided by the quorum, once"
                members[shard] |= {rank} if rows else set()
        return members

    def check(self) -> None:
        """Every step has the same members on every shard, as many as the quorum, and every weight has every step."""
        for step in range(STEPS):
            members = self.members(step)
            assert members == [members[0]] * SHARDS, step
            assert len(members[0]) == QUORUM, (step, members)
        weights = [dense[dense != 0.0] for dense in self.dense]
        assert all((part == -STEPS).all() for part in weights), "each step adds 1, whoever its members are"
        assert sum(map(len, weights)) == SIDE * SIDE
        assert min(map(len, weights)) > 0


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_each_step_has_its_quorum_on_every_shard(cluster: LocalCluster, cache_bytes: int) -> None:
    hold = 6
    with team(cluster, [1, 1, 10], cache_bytes=cache_bytes, hold=hold) as workers:
        reports = [report_of(worker) for worker in workers]
    shards = Shards(cluster)
    shards.check()
    for rank, report in enumerate(reports):
        assert report["taken"] == [step for step in range(STEPS) if rank in shards.members(step)[0]]
        stats = report["stats"]
        assert stats["steps_committed"] + stats["refused_steps"] + stats["missed_steps"] == STEPS
    slow = reports[2]["stats"]
    assert slow["refused_steps"] > 0
    assert slow["missed_steps"] >= hold - 1, "it goes on with the open step"
    assert sum(len(report["taken"]) for report in reports) == QUORUM * STEPS
    assert not cache_bytes or slow["cache_revalidated"] > 0, "rows of a step that it was outside of"


def test_the_others_go_on_without_a_worker_that_is_killed(cluster: LocalCluster) -> None:
    with team(cluster, [5, 5, 10], die_at=STEPS // 4) as workers:
        reports = [report_of(workers[rank]) for rank in (0, 2)]
        assert workers[1].wait(DEADLINE_SEC) == -signal.SIGKILL
    shards = Shards(cluster)
    shards.check()
    for rank, report in zip((0, 2), reports, strict=True):
        assert report["taken"] == [step for step in range(STEPS) if rank in shards.members(step)[0]]
    dead = [step for step in range(STEPS) if 1 in shards.members(step)[0]]
    assert dead, "its steps before count"
    assert reports[1]["taken"][-1] == STEPS - 1, "both that are left are needed, so the slow one waits for nobody"


def test_workers_go_back_together_to_a_checkpoint(cluster: LocalCluster, tmp_path: Path) -> None:
    run_ranks(str(SCRIPT.with_name("quorum_restore.py")), WORKERS, cluster.address, tmp_path, deadline_sec=DEADLINE_SEC)


@pytest.fixture
def log(tmp_path: Path) -> SyntheticLog:
    return write_click_log(tmp_path / "log", rows=SAMPLES, test_rows=4_000, seed=3)


def start_job(launcher: Launcher, log: SyntheticLog, *sets: str, resume: str = "never") -> Process:
    """A train job of three workers with a quorum of 2; its result is ``result.json`` beside the log."""
    settings = [
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.args.rows={'*': 200000}",
        f"train.batch_size={BATCH}",
    ]
    settings += ["train.threads=1", "train.workers=3", "train.dense=ps", "train.quorum=2", "train.epochs=2", *sets]
    assigned = [part for setting in settings for part in ("--set", setting)]
    result = str(log.train.parents[1] / "result.json")
    return launcher.start("train", str(JOBS / "demo.yaml"), *assigned, "--resume", resume, "--json", result)


def result_of(run: Process, log: SyntheticLog, *, code: int = 0) -> dict[str, Any]:
    assert run.popen.wait(600) == code, run.err
    figures: dict[str, Any] = json.loads((log.train.parents[1] / "result.json").read_text())
    assert 0.6 < figures["test_auc"] < log.bayes_auc
    assert figures["refused_steps"] == 0, "that counts NaN and Inf"
    samples = [epoch["samples"] for epoch in figures["history"]]
    assert len(samples) == 2
    assert sum(samples) <= 2 * BATCHES * QUORUM * BATCH, "two batches make a step"
    return figures


def test_a_train_job_with_a_quorum_ends(launcher: Launcher, log: SyntheticLog) -> None:
    run = start_job(launcher, log)
    quorum = result_of(run, log)["quorum"]
    assert quorum["refused_steps"] + quorum["missed_steps"] == 2 * BATCHES, "each step is without one of three"
    assert "steps without a worker" in run.out
    assert not launcher.living()


def test_a_train_job_goes_on_without_a_worker_that_is_killed(launcher: Launcher, log: SyntheticLog) -> None:
    run = start_job(launcher, log, "cluster.worker_lease=3s")
    run.wait_for("epoch 1/2")
    max(launcher.by_role()["worker"], key=lambda process: process.pid).kill()
    figures = result_of(run, log, code=4)  # what it had still to train on was left out
    assert (figures["workers"], figures["workers_lost"]) == (2, 1)
    assert "worker 2 ended by signal 9" in run.err
    assert "the other workers continue" in run.err
    assert not launcher.living()


def test_a_train_job_goes_on_from_a_checkpoint(launcher: Launcher, log: SyntheticLog) -> None:
    folder = Folder(str(log.train.parents[1] / "saves"))
    sets = [f"train.checkpoint={{url: {folder.url}, every_steps: 20}}"]
    run = start_job(launcher, log, *sets)
    wait_until(lambda: len(list_names(folder)) >= 2 or run.popen.poll() is not None, "two checkpoints")
    run.popen.kill()  # and its workers with it
    run.end()
    wait_until(lambda: not launcher.by_role()["worker"], "the workers to end")
    again = start_job(launcher, log, *sets, resume="auto")
    result_of(again, log)
    assert f"resumed from {folder.url}/save-" in again.err


def test_a_train_job_whose_shard_is_killed_says_so_and_goes_on_from_its_checkpoint(
    launcher: Launcher, log: SyntheticLog
) -> None:
    folder = Folder(str(log.train.parents[1] / "saves"))
    sets = [f"train.checkpoint={{url: {folder.url}, every_steps: 20}}", "cluster.shards=2"]
    run = start_job(launcher, log, *sets)
    wait_until(lambda: len(list_names(folder)) >= 2 or run.popen.poll() is not None, "two checkpoints")
    launcher.by_role()["shard"][0].kill()
    assert run.popen.wait(DEADLINE_SEC) == 1
    assert "ended by SIGKILL; its rows are lost" in run.err
    assert "is synchronous" in run.err
    wait_until(lambda: not launcher.living(), "the processes of the job to end")
    again = start_job(launcher, log, *sets, resume="auto")
    result_of(again, log)
    assert f"resumed from {folder.url}/save-" in again.err
