"""``sparserow train`` with real processes: one and two workers, plain torch and servers, bad input, nothing left."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from long_form import FULL
from sparserow.worker.data import write_click_log
from sparserow_process import free_port, wait_until

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"
KEYS = {
    "test_auc",
    "test_log_loss",
    "samples_per_sec",
    "epochs",
    "rows",
    "shards",
    "workers",
    "seed",
    "bad_lines",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_click_log(tmp_path_factory.mktemp("log"), rows=20_000, test_rows=4_000, seed=3)


def arguments(log, result: Path | None = None, *sets: str) -> list[str]:
    settings = [
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.args.rows={'*': 200000}",
        "train.batch_size=256",
    ]
    settings += ["train.threads=1", *sets]
    assigned = [part for setting in settings for part in ("--set", setting)]
    return ["train", str(JOBS / "demo.yaml"), *assigned, *(["--json", str(result)] if result else [])]


def finish(run) -> None:
    """Waits for a training run's good end."""
    assert run.popen.wait(600) == 0, run.err


@pytest.mark.parametrize(
    ("backend", "workers"),
    [("local", 1), ("ps", 2), *([("local", 2), ("ps", 1)] if FULL else [])],
)
def test_a_job_trains(launcher, log, tmp_path, backend, workers):
    result = tmp_path / "result.json"
    run = launcher.start(*arguments(log, result, f"model.backend={backend}", f"train.workers={workers}"))
    finish(run)
    figures = json.loads(result.read_text())
    assert figures.keys() >= KEYS
    assert 0.62 < figures["test_auc"] < log.bayes_auc
    assert (figures["workers"], figures["shards"]) == (workers, 2 if backend == "ps" else 0)
    assert (figures["epochs"], figures["seed"], figures["bad_lines"]) == (1, 0, 0)
    assert figures["history"][0]["samples"] == 20_000
    assert figures["rows"] > 10_000
    assert "test AUC" in run.out
    assert "epoch 1/1: loss" in run.err
    assert not launcher.living()


@pytest.mark.full("test_elastic.py and test_dense_on_servers.py have such workers")
def test_two_epochs_of_two_asynchronous_workers(launcher, log, tmp_path):
    result = tmp_path / "result.json"
    sets = (
        "train.staleness=null",
        "train.epochs=2",
        "train.schedule={kind: step, every_epochs: 1}",
        "train.workers=2",
        "cluster.shards=1",
    )
    run = launcher.start(*arguments(log, result, *sets))
    finish(run)
    figures = json.loads(result.read_text())
    assert figures["test_auc"] > 0.62
    assert figures["shards"] == 1


@pytest.mark.full("test_training_options.py compares them weight by weight")
def test_servers_and_plain_torch_learn_the_same(launcher, log, tmp_path):
    figures = {}
    for backend in ("ps", "local"):
        result = tmp_path / f"{backend}.json"
        run = launcher.start(
            *arguments(
                log,
                result,
                f"model.backend={backend}",
                "model.args.rows={'*': 5000}",
                "model.min_rows=1",
                "train.epochs=2",
            )
        )
        finish(run)
        figures[backend] = json.loads(result.read_text())
    assert figures["ps"]["test_auc"] == pytest.approx(figures["local"]["test_auc"], abs=0.02)


def test_a_running_cluster_is_used_and_left_running(launcher, log, tmp_path):
    cluster = launcher.start("up", "--shards=1", "--port=0")
    address = cluster.wait_for(r"ready at (\S+)")[1]
    for name in ("one", *(["two"] if FULL else [])):
        result = tmp_path / f"{name}.json"
        run = launcher.start(*arguments(log, result, f"cluster={{address: '{address}'}}", f"name={name}"))
        finish(run)
        assert json.loads(result.read_text())["shards"] == 1
    assert cluster.popen.poll() is None
    cluster.signal(signal.SIGTERM)
    assert cluster.end() == 0


def test_torchrun_starts_the_workers(launcher, log, tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["-m", "sparserow.deploy.cli", *arguments(log, result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=launcher.environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(result.read_text())
    assert (figures["workers"], figures["shards"]) == (2, 2)
    assert not launcher.living()


@pytest.mark.parametrize("workers", [*([1] if FULL else []), 2])
def test_a_malformed_line_ends_the_job_in_one_line(launcher, log, tmp_path, workers):
    bad = tmp_path / "bad.tsv"
    lines = log.train.read_text().splitlines()
    fields = lines[15_000].split("\t")
    lines[15_000] = "\t".join([*fields[:20], "not hex", *fields[21:]])
    bad.write_text("\n".join(lines))
    sets = (f"data.train={bad}", f"train.workers={workers}")
    line = launcher.start(*arguments(log, None, *sets)).error_line()
    assert "bad.tsv, line 15001, column C7: 'not hex' is not 1-8 hexadecimal digits" in line
    wait_until(lambda: not launcher.living(), "no process is left")

    result = tmp_path / "result.json"
    run = launcher.start(*arguments(log, result, *sets, "data.on_bad_line=skip", "model.backend=local"))
    finish(run)
    figures = json.loads(result.read_text())
    assert figures["bad_lines"] == 1
    assert "line 15001, column C7" in figures["first_bad_line"]
    assert figures["history"][0]["samples"] == 19_999


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.train=/nowhere/train.tsv", "/nowhere/train.tsv: No such file or directory"),
        ("train.epoch=2", "train.epoch: unknown key; did you mean 'epochs'"),
        ("model.args.rows={C99: 5, '*': 5}", "model.args: DLRM reads 'C99', which is no feature; nearest: C"),
        ("cluster={address: '127.0.0.1:PORT'}", "127.0.0.1:PORT"),
        ("cluster.port=PORT", "PORT"),
    ],
)
def test_bad_settings_end_in_one_line(launcher, log, setting, message):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(free_port() if "address" in setting else taken.getsockname()[1])
        line = launcher.start(*arguments(log, None, setting.replace("PORT", port))).error_line()
    assert message.replace("PORT", port) in line
    wait_until(lambda: not launcher.living(), "no process is left")


def test_an_unwritable_result_is_refused_before_the_work(launcher, log, tmp_path):
    line = launcher.start(*arguments(log, tmp_path / "absent" / "result.json")).error_line()
    assert "--json" in line
    assert "cannot be written" in line


def test_an_absent_job_file(launcher, tmp_path):
    assert "absent.yaml: cannot be read" in launcher.start("train", str(tmp_path / "absent.yaml")).error_line()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, *([signal.SIGTERM] if FULL else [])])
def test_a_killed_job_leaves_no_process(launcher, log, number):
    run = launcher.start(*arguments(log, None, "train.epochs=1000", "train.workers=2"))
    run.wait_for("epoch 2/1000")
    assert len(launcher.living()) >= 6  # the command, two workers, the coordinator, two shards
    run.signal(number)
    assert run.end() != 0
    wait_until(lambda: not launcher.living(), "no process is left")


@pytest.mark.started
def test_a_killed_worker_ends_the_job(launcher, log):
    run = launcher.start(*arguments(log, None, "train.epochs=1000", "train.workers=2"))
    run.wait_for("epoch 2/1000")
    victim = next(p for p in launcher.living() if any("worker_process" in part for part in p.cmdline()))
    victim.kill()
    assert run.end() == 1
    assert "sparserow: " in run.err.splitlines()[-1]
    wait_until(lambda: not launcher.living(), "no process is left")


def test_demo(launcher, tmp_path):
    result = tmp_path / "demo.json"
    run = launcher.start("demo", "--rows=30000", "--workers=2", "--shards=2", "--json", str(result))
    finish(run)
    figures = json.loads(result.read_text())
    assert figures.keys() >= {"test_auc", "bayes_auc", "samples_per_sec", "rows", "shards", "workers"}
    assert (figures["rows"], figures["shards"], figures["workers"]) == (30000, 2, 2)
    assert 0.65 < figures["test_auc"] < figures["bayes_auc"]
    assert "AUC of the generating model" in run.out
    assert figures["serving_rows_checked"] == figures["serving_rows_equal"] == figures["table_rows"]
    assert figures["lookup_p50_ms"] > 0
    fresh = figures["freshness_p99_ms"]  # None: training was over when the serving process had caught up
    assert fresh is None or fresh > 0
    assert not launcher.living()


def test_demo_refuses_bad_options(launcher):
    assert "--rows: 0 is not allowed" in launcher.start("demo", "--rows=0").error_line()
    assert "cluster.shards: 0 is not allowed" in launcher.start("demo", "--shards=0").error_line()
