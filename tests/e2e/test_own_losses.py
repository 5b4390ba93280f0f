"""A job with a loss of one's own, by its command: one that equals bce trains to its bits, and others are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import sparserow as sr
from sparserow_process import Launcher

JOB = """
name: shop
data:
  format: parquet
  train: FOLDER/train.parquet
  test: FOLDER/test.parquet
  columns: {labels: {click: {}, sale: {}}, sample_weight: weight, group: user}
features:
  age: {kind: dense}
  item: {kind: id, modulo: 200}
  history: {kind: sequence, modulo: 200, max_len: 20}
  brand: {kind: id, modulo: 30}
model:
  class: own_models:Shop
  args: {items: 200, brands: 30, record: FOLDER/record}
  min_rows: 10
tasks:
  click: {}
  sale: {weight: 0.5}
train:
  batch_size: 16
  dense_optimizer: {kind: adam, lr: 0.01}
  row_optimizer: {kind: adagrad, lr: 0.1}
"""
OWN = "tasks={click: {loss: 'own_losses:bce', metrics: bce}, sale: {weight: 0.5, loss: 'own_losses:bce', metrics: bce}}"


def sales(rows: int, seed: int) -> pa.Table:
    draw = np.random.default_rng(seed)
    items, clicks = draw.integers(0, 200, rows), draw.random(rows) < 0.5
    histories = [draw.integers(0, 200, length).tolist() for length in draw.integers(0, 7, rows)]
    return pa.table(
        {
            "click": clicks.astype(np.int8),
            "sale": (clicks & (items % 3 == 0)).astype(np.int8),
            "weight": draw.random(rows).astype(np.float32),
            "user": draw.integers(0, 40, rows),
            "age": draw.random(rows).astype(np.float32),
            "item": items,
            "history": pa.array(histories, pa.list_(pa.int64())),
            "brand": draw.integers(0, 30, rows),
        }
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sales")
    pa.parquet.write_table(sales(1015, 1), folder / "train.parquet", row_group_size=100)  # the last steps are uneven
    pa.parquet.write_table(sales(300, 2), folder / "test.parquet", row_group_size=100)
    return folder


@pytest.fixture
def launcher(launcher: Launcher) -> Launcher:
    """A launcher whose processes find the modules of the model and the loss, as in the folder of their user."""
    return launcher.with_support_modules()


def run(launcher: Launcher, data: Path, folder: Path, sets: list[str]) -> tuple[dict[str, Any], list[bytes]]:
    """The result of a job, and the logits of each worker's steps."""
    (folder / "record").mkdir(parents=True)
    text = JOB.replace("FOLDER/record", str(folder / "record")).replace("FOLDER", str(data))
    (folder / "job.yaml").write_text(text)
    given = [word for each in sets for word in ("--set", each)]
    process = launcher.start("train", str(folder / "job.yaml"), *given, "--json", str(folder / "result.json"))
    assert process.popen.wait(300) == 0, process.err
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result, sorted(path.read_bytes() for path in (folder / "record").iterdir())


def figures(result: dict[str, Any]) -> list[Any]:
    """What a run computed in its epochs; a rate is of time."""
    return [{name: value for name, value in epoch.items() if name != "samples_per_sec"} for epoch in result["history"]]


@pytest.mark.parametrize(
    "sets",
    [
        ["train.workers=2", "train.accumulate=2", "train.epochs=2"],
        ["train.dense=ps", "train.staleness=2", "train.elastic={lease_rows: 64}"],
        ["model.backend=local", "metrics={weighted: true, stop: {metric: click.gauc}}"],
    ],
    ids=["allreduce", "leases", "local"],
)
def test_a_loss_that_equals_bce_trains_to_its_bits(
    launcher: Launcher, data: Path, tmp_path: Path, sets: list[str]
) -> None:
    wanted, logits = run(launcher, data, tmp_path / "bce", sets)
    found, own = run(launcher, data, tmp_path / "own", [*sets, OWN])
    assert own == logits
    assert sum(map(len, logits)) >= 1015 * 4
    assert repr(figures(found)) == repr(figures(wanted)), "of all digits, and NaN is NaN"


def test_a_loss_of_ones_own_trains_another_model_that_is_served(launcher: Launcher, data: Path, tmp_path: Path) -> None:
    sets = [
        f"publish={{root: {tmp_path}/models}}",
        f"metrics={{progressive: {{window: 500}}, file: {tmp_path}/m.jsonl}}",
    ]
    _, logits = run(launcher, data, tmp_path / "bce", [])
    result, own = run(launcher, data, tmp_path / "focal", [*sets, OWN.replace("losses:bce", "losses:focal")])
    assert own != logits
    metrics = result["history"][-1]["metrics"]
    assert {"click.auc", "click.gauc", "sale.log_loss"} <= set(metrics), "the metrics are those of bce"
    windows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in windows if line["kind"] == "window"] == [512, 1015]
    with (
        sr.local_serving("shop", root=str(tmp_path / "models")) as serving,
        sr.ServingClient(serving.addresses) as client,
        sr.ServedModel(client, str(tmp_path / "models")) as served,
    ):
        out = served.predict(pa.parquet.read_table(data / "test.parquet")).output["click"].numpy()
    labels = pa.parquet.read_table(data / "test.parquet")["click"].to_numpy()
    losses = np.logaddexp(0, out) - labels * out
    assert losses.mean() == pytest.approx(metrics["click.log_loss"], abs=1e-5), "what is served is a logit"


LOSS = """
import torch
from torch.nn import functional

def focal(scores, labels):
    losses = functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    return (losses * (1 - torch.exp(-losses)) ** 2)MEAN

def undefined(scores, labels):
    return scores * float("nan")
"""


def in_folder(data: Path, folder: Path, *options: str, end: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a job whose loss is in a file beside it, as its user does."""
    (folder / "losses.py").write_text(LOSS.replace("MEAN", end))
    (folder / "job.yaml").write_text(
        JOB.replace("FOLDER/record", "''").replace("FOLDER", str(data)).replace("own_models:", "models:")
    )
    (folder / "models.py").write_text((Path(__file__).parents[1] / "support" / "own_models.py").read_text())
    command = [sys.executable, "-m", "sparserow.deploy.cli", "train", "job.yaml", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


def task(name: str) -> str:
    return f"--set=tasks={{click: {{loss: 'losses:{name}', metrics: bce}}, sale: {{}}}}"


def test_a_function_beside_the_job_is_found_and_its_mistakes_are_named(data: Path, tmp_path: Path) -> None:
    done = in_folder(data, tmp_path, task("focal"), "--dry-run")
    assert done.returncode == 0, done.stderr
    for options in (["--dry-run"], ["--set=train.workers=2"]):
        done = in_folder(data, tmp_path, task("focal"), *options, end=".mean()")
        said = " ".join(done.stderr.split())
        assert done.returncode == 1
        assert "tasks.click.loss: losses:focal returned () float32 on cpu for 4 samples; allowed: a loss for" in said
        assert "Traceback" not in said
    assert "cluster" not in done.stdout, "nothing is started"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_that_is_undefined_takes_no_step(data: Path, tmp_path: Path, workers: int) -> None:
    done = in_folder(data, tmp_path, task("undefined"), f"--set=train.workers={workers}")
    said = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert "train: the loss is nan (tasks.click.loss: losses:undefined) after 0 samples" in said
