"""``metrics.best``: the model of the best epoch is published, whatever comes after it and whatever is killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import sparserow as sr
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.best import BestCheckpoint, best_in
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.config.checkpoint_config import CheckpointConfig
from sparserow.proto.control import ControlClient
from sparserow.proto.published.registry import ModelRegistry
from sparserow.worker.data import SalesLog, write_sales_log
from sparserow.worker.metrics.binary import log_loss
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.training_checkpoints import Progress, TrainedParts, TrainingCheckpoints
from sparserow_process import Launcher, wait_until

EPOCHS, STEPS, WAIT_SEC = 4, 8, 300
# With such learning rates the log loss on the test files gets worse from the first epoch on.
JOB = """
name: clicks
data: {format: parquet, train: TRAIN, test: TEST, columns: {label: click}}
features:
  user: {kind: id, modulo: 3000}
  item: {kind: id, modulo: 3000}
  price: {kind: dense, log1p: true, scale: standardize}
model:
  class: DeepFM
  args: {rows: {user: 3000, item: 3000}, numbers: [price], dim: 8, hidden: [16]}
  min_rows: 10
metrics: {best: label.log_loss, file: FOLDER/run.jsonl}
train:
  epochs: 4
  batch_size: 128
  workers: 2
  prefetch: 1
  threads: 1
  schedule: {kind: step, every_epochs: 1, factor: 0.9}
  dense_optimizer: {kind: adam, lr: 0.01}
  row_optimizer: {kind: adagrad, lr: 0.5}
  checkpoint: {url: FOLDER/ckpt, every_steps: 3, keep: 1}
cluster: {shards: 2, slot_count: 256, worker_lease: 20s}
publish: {root: FOLDER/models}
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> SalesLog:
    folder = tmp_path_factory.mktemp("sales")
    return write_sales_log(folder, rows=STEPS * 256, test_rows=1_000, users=300, items=100, history=0, seed=4)


def job_in(folder: Path, log: SalesLog) -> str:
    text = JOB.replace("FOLDER", str(folder)).replace("TRAIN", str(log.train)).replace("TEST", str(log.test))
    (folder / "job.yaml").write_text(text)
    return str(folder / "job.yaml")


def check_what_is_left(folder: Path, log: SalesLog) -> dict[str, Any]:
    """The published model is that of the best epoch, and its checkpoint is there beside the newest one."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    losses = [epoch["test_log_loss"] for epoch in result["history"]]
    best = losses.index(min(losses))
    assert len(losses) == EPOCHS
    assert best < EPOCHS - 1, "the last epoch is not the best"
    assert (result["best_epoch"], result["test_log_loss"]) == (best + 1, losses[best])
    checkpoints = Folder(str(folder / "ckpt"))
    noted = best_in(checkpoints)
    assert noted == BestCheckpoint(
        result["best_checkpoint"], best + 1, "label.log_loss", losses[best], STEPS * (best + 1)
    )
    newest = files.list_names(checkpoints)
    assert newest[0] == noted.name
    assert len(newest) <= 3, "keep is 1; the checkpoint that a run went on from may be there too"
    root = str(folder / "models")
    registry = ModelRegistry(root)
    card = registry.manifest("clicks", registry.versions("clicks")[-1]).card
    assert card == {
        "step": STEPS * (best + 1),
        "epochs": best + 1,
        "auc": pytest.approx(result["test_auc"]),
        "log_loss": pytest.approx(losses[best]),
        "checkpoint": f"{checkpoints.url}/{noted.name}",
    }
    test = pq.read_table(log.test)
    with (
        sr.local_serving("clicks", root=root) as serving,
        sr.ServingClient(serving.addresses) as client,
        sr.ServedModel(client, root) as served,
    ):
        logits = served.predict(test).output.numpy()
    assert log_loss(logits, test["click"].to_numpy()) == pytest.approx(losses[best], abs=1e-6)
    return result


@pytest.fixture(scope="module")
def undisturbed(log: SalesLog, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    launcher = Launcher(folder)
    try:
        run = launcher.start("train", job_in(folder, log), "--json", str(folder / "result.json"))
        assert run.popen.wait(WAIT_SEC) == 0, run.err
        listed = launcher.start("checkpoint", "list", str(folder / "ckpt"))
        assert listed.popen.wait(60) == 0
    finally:
        launcher.kill_all()
    result = check_what_is_left(folder, log)
    assert f"{result['best_checkpoint']} is the best: label.log_loss" in listed.out
    assert f"the model is that of epoch {result['best_epoch']} ({result['best_checkpoint']})" in run.out
    assert "epochs.json was not written" not in run.err
    return result


def is_past_the_best(folder: Path, best: int) -> bool:
    """Whether an epoch after the best one was reported."""
    try:
        return len(json.loads((folder / "ckpt" / "epochs.json").read_text())["epochs"]) > best
    except (OSError, ValueError):  # it is not there, or is being written
        return False


def test_the_best_model_is_published_and_its_checkpoint_stays(undisturbed: dict[str, Any]) -> None:
    losses = [epoch["test_log_loss"] for epoch in undisturbed["history"]]
    assert losses[-1] > losses[undisturbed["best_epoch"] - 1] + 0.05, "the model got much worse"


@pytest.mark.full("tests/unit/worker/training/test_best_model.py has the rule")
@pytest.mark.parametrize("kind", ["worker", "run"])
def test_a_kill_after_the_best_epoch_changes_nothing(
    launcher: Launcher, log: SalesLog, tmp_path: Path, undisturbed: dict[str, Any], kind: str
) -> None:
    words = ("train", job_in(tmp_path, log), "--json", str(tmp_path / "result.json"), "--resume", "auto")
    run = launcher.start(*words)
    best = undisturbed["best_epoch"]
    wait_until(lambda: is_past_the_best(tmp_path, best) or run.popen.poll() is not None, "an epoch after it", WAIT_SEC)
    if kind == "worker":
        for worker in launcher.by_role()["worker"][:1]:
            worker.send_signal(signal.SIGKILL)
    else:
        launcher.kill_all()
        run = launcher.start(*words)
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    result = check_what_is_left(tmp_path, log)
    for name in ("best_epoch", "test_log_loss", "test_auc"):
        assert result[name] == undisturbed[name], name


@pytest.mark.full
def test_a_run_goes_on_from_the_best_checkpoint_by_its_name(
    launcher: Launcher, log: SalesLog, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    job = job_in(tmp_path, log)
    first = launcher.start("train", job, "--set", "train.epochs=2")
    assert first.popen.wait(WAIT_SEC) == 0, first.err
    best = best_in(Folder(str(tmp_path / "ckpt")))
    assert best is not None
    again = launcher.start("train", job, "--json", str(tmp_path / "result.json"), "--resume", best.name)
    assert again.popen.wait(WAIT_SEC) == 0, again.err
    assert f"{best.name}, step " in again.err
    result = check_what_is_left(tmp_path, log)
    assert [epoch["metrics"] for epoch in result["history"]] == [epoch["metrics"] for epoch in undisturbed["history"]]


class Parts:
    """Stands for the schedule, the reader and the steps of a trainer."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def test_the_rows_of_other_namespaces_stay_when_the_best_ones_come_back(tmp_path: Path) -> None:
    keys, config = np.arange(5, dtype=np.uint64), CheckpointConfig(url=str(tmp_path), every_steps=1)
    with sr.local_cluster(shards=2, slot_count=64) as cluster:

        def assign_other(value: float) -> None:
            with sr.connect(cluster.address, "other", staleness=None) as other:
                other.create_table("t", dim=2, optimizer=sr.optim.SGD(lr=1.0)).assign(
                    keys, np.full((5, 2), value, np.float32)
                )

        assign_other(1.0)
        with sr.connect(cluster.address, "mine", rank=0, world_size=1) as session:
            model = session.distribute(
                nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1)), optimizer=sr.optim.SGD(lr=1.0), min_rows=1
            )
            parts = TrainedParts(
                model=model, optimizer=None, scaler=None, schedule=Parts(), reader=Parts(), steps=Parts()
            )
            checkpoints = TrainingCheckpoints(config, session=session, group=WorkerGroup(), parts=parts, run={})
            table, weight = session.table("0"), model[1].weight
            wanted, dense = table.pull(keys), weight.detach().clone()
            name = checkpoints.save_now(Progress())
            assert name is not None
            model(torch.arange(5)).sum().backward()
            session.step()
            assign_other(2.0)
            with torch.no_grad():
                weight.add_(1.0)
            assert not np.array_equal(table.pull(keys), wanted)
            late = session.create_table("late", dim=2, optimizer=sr.optim.SGD(lr=1.0))
            late.assign(keys, np.ones((5, 2), np.float32))
            with sr.connect(cluster.address, "other", staleness=None) as other:  # another job goes on meanwhile
                checkpoints.load(name)
                assert (other.table("t").pull(keys) == 2.0).all()
            np.testing.assert_array_equal(table.pull(keys), wanted)
            assert not late.pull(keys).any(), "a table that is newer than the best checkpoint has no rows of it"
            assert torch.equal(weight, dense)
            with ControlClient(cluster.address, deadline_sec=60) as control:
                assert control.status().checkpoint.endswith(name), "from which a shard can return"
        with sr.connect(cluster.address, "other", staleness=None) as other:
            assert (other.table("t").pull(keys) == 2.0).all(), "another job has trained them since"
