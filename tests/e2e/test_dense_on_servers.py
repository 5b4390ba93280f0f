"""``train.dense: ps`` with real processes: a job trains; one worker is killed and the other goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sparserow.worker.data import write_click_log
from sparserow_process import Launcher, wait_until

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_click_log(tmp_path_factory.mktemp("log"), rows=20_000, test_rows=4_000, seed=3)


def start(launcher: Launcher, log, result: Path, *sets: str):
    settings = [f"data.train={log.train}", f"data.test={log.test}", "model.rows=200000", "train.batch_size=256"]
    settings += ["train.threads=1", "train.workers=2", "train.dense=ps", *sets]
    assigned = [part for setting in settings for part in ("--set", setting)]
    return launcher.start("train", str(JOBS / "demo.yaml"), *assigned, "--json", str(result))


@pytest.mark.parametrize("staleness", ["0", "4", "null"])
def test_a_job_trains_without_a_process_group(launcher, log, tmp_path, staleness):
    result = tmp_path / "result.json"
    run = start(launcher, log, result, f"train.staleness={staleness}")
    assert run.popen.wait(300) == 0, run.err
    figures = json.loads(result.read_text())
    assert 0.62 < figures["test_auc"] < log.bayes_auc
    assert (figures["workers"], figures["shards"]) == (2, 2)
    assert figures["history"][0]["samples"] == 20_000
    assert not launcher.living()


def test_a_killed_worker_is_given_up_and_the_job_goes_on(launcher, log, tmp_path):
    result = tmp_path / "result.json"
    run = start(launcher, log, result, "train.staleness=4", "train.epochs=6", "cluster.worker_lease=1s")
    run.wait_for("epoch 2/6")
    workers = [p for p in launcher.living() if any("worker_process" in part for part in p.cmdline())]
    max(workers, key=lambda process: process.pid).kill()  # worker 1: the second that was started
    assert run.popen.wait(300) == 0, run.err
    assert "worker 1 ended by signal 9; its messages are on stderr; the others go on" in run.err
    figures = json.loads(result.read_text())
    assert figures["workers"] == 1
    assert len(figures["history"]) == 6
    assert figures["test_auc"] > 0.62
    wait_until(lambda: not launcher.living(), "no process is left")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.backend=local", "train.dense: ps needs model.backend ps"),
        ("train.zero=true", "train.zero: is not possible with train.dense ps"),
        ("train.clip_norm=1", "train.clip_norm: is not possible with train.dense ps"),
        ("train.clip_row_norm=1", "train.clip_row_norm: is not possible with train.dense ps"),
        ("train.dense_optimizer.kind=adamw", "train.dense_optimizer.kind: adamw is not allowed with train.dense ps"),
    ],
)
def test_what_it_cannot_do_is_one_line(launcher, log, tmp_path, setting, message):
    assert message in start(launcher, log, tmp_path / "result.json", setting).error_line()
