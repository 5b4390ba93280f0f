"""A job whose model has tables alone, such as a matrix factorization: no weight is left for a dense optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparserow.proto.config.job import JobConfig
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.options.document import load_config
from sparserow.worker.training.local_backend import LocalBackend
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence
from sparserow_process import Launcher

JOB = """
name: factors
data:
  format: csv
  train: LOG
  test: LOG
  csv: {columns: [y, user, item], label: y}
features: {user: {kind: id, modulo: 1000}, item: {kind: id, modulo: 1000}}
model: {class: "own_models:Factors", args: {rows: 1000}, min_rows: 1}
train: {batch_size: 50, threads: 1, row_optimizer: {kind: adagrad, lr: 0.5}}
"""


@pytest.fixture
def launcher(launcher: Launcher) -> Launcher:
    """A launcher whose processes find the model's module, as in the folder of its user."""
    return launcher.with_support_modules()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    log = tmp_path / "log.csv"
    log.write_text("".join(f"{int(i % 3 == i % 5)},u{i % 3},i{i % 5}\n" for i in range(1500)))
    (tmp_path / "job.yaml").write_text(JOB.replace("LOG", str(log)))
    return tmp_path / "job.yaml"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_matrix_factorization_trains_and_goes_on(job: Path, launcher: Launcher, tmp_path: Path, workers: int) -> None:
    result, url = tmp_path / "result.json", tmp_path / "ckpt"
    words = ["train", str(job), "--json", str(result), "--set", f"train.workers={workers}", "--set", "cluster.shards=1"]
    words += ["--set", f"train.checkpoint={{url: '{url}', every_steps: 20}}", "--resume", "auto"]
    for epochs in (2, 4):
        run = launcher.start(*words, "--set", f"train.epochs={epochs}")
        assert run.end() == 0, run.err
    figures = json.loads(result.read_text())
    assert figures["rows"] == 3 + 5
    assert figures["test_auc"] > 0.9
    assert "resumed from" in run.err


def test_so_it_does_in_plain_torch_and_zero_is_refused(job: Path) -> None:
    sets = ["model.backend=local", "train.epochs=4"]
    config = load_config(JobConfig, job, sets)
    backend = LocalBackend(config.train, config.model.min_rows)
    assert Trainer(config, group=WorkerGroup(), backend=backend, observer=Silence()).run().test_auc > 0.9
    config = load_config(JobConfig, job, [*sets, "train.parallel={shard: optimizer}"])
    backend = LocalBackend(config.train, config.model.min_rows)
    with pytest.raises(InvalidArgument, match=r"train\.parallel\.shard: optimizer"):
        Trainer(config, group=WorkerGroup(), backend=backend, observer=Silence())


def test_a_table_that_no_step_trained_is_told(job: Path, launcher: Launcher) -> None:
    words = ["train", str(job), "--set", "cluster.shards=1"]
    run = launcher.start(*words, "--set", "model.class=own_models:Forgetful")
    assert run.end() == 0, run.err
    assert "no row of table item was trained: " in run.err
    run = launcher.start(*words)
    assert run.end() == 0, run.err
    assert "was trained: " not in run.err
