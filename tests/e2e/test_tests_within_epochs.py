"""``train.test_every`` by the command: no bit of training changes, all workers agree, and kills lose no test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_job import write_job
from sparserow.proto.checkpoint.best import best_in
from sparserow.proto.checkpoint.folder import Folder
from sparserow_process import Launcher, wait_until

SAMPLES, BATCH, WORKERS = 2_010, 32, 2  # 32 steps an epoch; the workers' last batches differ
STEPS, WAIT_SEC = 32, 300
JOB = """
name: clicks
data: {format: csv, train: DATA/train.csv, test: DATA/test.csv, csv: {columns: [click, user, item], label: click}}
features: {user: {kind: id, modulo: 50}, item: {kind: id, modulo: 50}}
model: {class: "own_models:Noisy", args: {rows: 50, record: FOLDER/record}, min_rows: 10}
tasks: {click: {}}
metrics: {file: FOLDER/run.jsonl}
train:
  batch_size: 32
  workers: 2
  threads: 1
  prefetch: 2
  dense_optimizer: {kind: adam, lr: 0.02}
  row_optimizer: {kind: adagrad, lr: 0.2}
cluster: {shards: 2, slot_count: 256, worker_lease: 20s}
"""
BEST = "metrics={best: click.log_loss, file: FOLDER/run.jsonl}"
DEEP_FM = "model={class: DeepFM, args: {rows: {user: 50, item: 50}, dim: 4, hidden: [16]}, min_rows: 10}"
SAVED = "train.checkpoint={url: FOLDER/ckpt, every_steps: 10, keep: 1}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("clicks"), np.random.default_rng(3)
    for name, count in (("train", SAMPLES), ("test", 400)):
        keys = draw.integers(0, 50, (count, 2))
        labels = draw.random(count) < np.where(keys.sum(1) % 3 == 0, 0.8, 0.2)
        lines = [f"{int(label)},{user},{item}" for label, (user, item) in zip(labels, keys, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def launcher(launcher: Launcher) -> Launcher:
    """A launcher whose processes find the model's module, as in the folder of its user."""
    return launcher.with_support_modules()


def words(data: Path, folder: Path, sets: list[str]) -> list[str]:
    """The words of the command of a job in a folder."""
    (folder / "record").mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(JOB.replace("FOLDER", str(folder)).replace("DATA", str(data)))
    given = [word for each in sets for word in ("--set", each.replace("FOLDER", str(folder)))]
    return ["train", str(folder / "job.yaml"), *given, "--json", str(folder / "result.json")]


def run(launcher: Launcher, data: Path, folder: Path, sets: list[str]) -> dict[str, Any]:
    process = launcher.start(*words(data, folder, sets))
    assert process.popen.wait(WAIT_SEC) == 0, process.err
    return result_in(folder)


def result_in(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def logits(folder: Path) -> list[bytes]:
    """The logits of each worker's training steps."""
    return sorted(path.read_bytes() for path in (folder / "record").iterdir())


def figures(result: dict[str, Any], what: str) -> list[Any]:
    return [{name: value for name, value in each.items() if name != "samples_per_sec"} for each in result[what]]


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


@pytest.fixture(scope="module")
def untested(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[bytes]]:
    """The result of two workers without tests within epochs."""
    folder = tmp_path_factory.mktemp("untested")
    launcher = Launcher(folder).with_support_modules()
    try:
        result = run(launcher, data, folder, ["train.epochs=2"])
    finally:
        launcher.kill_all()
    assert len(logits(folder)) == WORKERS
    return result, logits(folder)


@pytest.mark.parametrize("every", ["steps: 5", "seconds: 0.000001"])
def test_two_workers_test_together_and_train_to_the_same_bits(
    launcher: Launcher, data: Path, tmp_path: Path, untested: tuple[dict[str, Any], list[bytes]], every: str
) -> None:
    wanted, wanted_logits = untested
    result = run(launcher, data, tmp_path, ["train.epochs=2", f"train.test_every={{{every}}}"])
    assert logits(tmp_path) == wanted_logits
    assert repr(figures(result, "history")) == repr(figures(wanted, "history")), "of all digits"
    step = 5 if every == "steps: 5" else 1
    assert [each["step"] for each in result["points"]] == list(range(step, 2 * STEPS + 1, step))
    first = result["points"][0]
    assert (first["epoch"], first["samples"]) == (1, step * BATCH * WORKERS)
    told = lines(tmp_path, "test")
    assert [each["samples"] for each in told] == [each["samples"] for each in result["points"]]
    last = [each for each in result["points"] if each["epoch"] == 1 and each["step"] == STEPS]
    assert all(each["samples"] == SAMPLES for each in last)


LONG = pytest.mark.full("workers that meet on servers, and one alone, are tested above and here")


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param(["train.workers=1", "train.dense=ps"], id="dense on servers"),
        pytest.param(["model.backend=local", "train.prefetch=0", "cluster={}"], id="local", marks=LONG),
        pytest.param(["tables={'*': {placement: device}}", "train.prefetch=0"], id="on devices", marks=LONG),
        pytest.param([DEEP_FM, "train.workers=4", "train.parallel={shard: all, tensor: 2}"], id="in parts", marks=LONG),
    ],
)
def test_no_bit_changes_wherever_rows_and_tower_are(
    launcher: Launcher, data: Path, tmp_path: Path, sets: list[str]
) -> None:
    wanted = run(launcher, data, tmp_path / "untested", sets)
    result = run(launcher, data, tmp_path / "tested", [*sets, "train.test_every={steps: 7}"])
    assert logits(tmp_path / "tested") == logits(tmp_path / "untested")
    assert repr(figures(result, "history")) == repr(figures(wanted, "history"))
    assert wanted["points"] == []
    assert result["points"][0]["step"] == 7


def is_past(folder: Path, tests: int) -> bool:
    """Whether so many tests were reported."""
    return (folder / "run.jsonl").exists() and len(lines(folder, "test")) >= tests


def test_a_run_of_one_epoch_that_is_killed_goes_on_with_its_tests_and_its_best(
    launcher: Launcher, data: Path, tmp_path: Path
) -> None:
    # With such a learning rate the log loss on the test files goes up and down.
    sets = [BEST, SAVED, "train.test_every={steps: 4}", "train.dense_optimizer={kind: adam, lr: 1.0}"]
    undisturbed = run(launcher, data, tmp_path / "undisturbed", sets)
    assert undisturbed["best_step"] < STEPS, "the last test is not the best"
    assert len(undisturbed["points"]) == STEPS // 4
    best = best_in(Folder(str(tmp_path / "undisturbed" / "ckpt")))
    assert best is not None
    assert (best.step, best.epoch) == (undisturbed["best_step"], 1)
    values = [point["metrics"]["click.log_loss"] for point in undisturbed["points"]]
    assert undisturbed["test_log_loss"] == best.value == min(values)
    folder = tmp_path / "killed"
    command = words(data, folder, sets)
    process = launcher.start(*command)
    wait_until(lambda: is_past(folder, 5) or process.popen.poll() is not None, "tests", WAIT_SEC)
    launcher.kill_all()
    before = len(lines(folder, "test"))
    again = launcher.start(*command, "--resume", "auto")
    assert again.popen.wait(WAIT_SEC) == 0, again.err
    result = result_in(folder)
    for name in ("points", "history"):
        assert repr(figures(result, name)) == repr(figures(undisturbed, name)), name
    for name in ("best_epoch", "best_step", "test_log_loss", "test_auc"):
        assert result[name] == undisturbed[name], name
    passed = int(again.err.partition(", step ")[2].partition(",")[0]) + 1
    made_again = [line["step"] for line in lines(folder, "test")[before:]]
    assert made_again == list(range(4, STEPS + 1, 4))[passed // 4 :], "those of steps that were passed are not made"


def test_a_run_stops_within_its_only_epoch_and_stays_stopped(launcher: Launcher, data: Path, tmp_path: Path) -> None:
    metrics = "metrics={file: FOLDER/run.jsonl, stop: {metric: click.auc, after: 2, least_gain: 0.5}}"
    command = words(data, tmp_path, [metrics, SAVED, "train.test_every={steps: 4}"])
    first = launcher.start(*command)
    assert first.popen.wait(WAIT_SEC) == 0, first.err
    result = result_in(tmp_path)
    assert [point["step"] for point in result["points"]] == [4, 8, 12]
    assert [(each["step"], each["samples"]) for each in result["history"]] == [(12, 12 * BATCH * WORKERS)]
    assert len(logits(tmp_path)[0]) == 12 * BATCH * 4
    again = launcher.start(*command, "--resume", "auto")
    assert again.popen.wait(WAIT_SEC) == 0, again.err
    assert figures(result_in(tmp_path), "points") == figures(result, "points")
    assert [each["metrics"] for each in result_in(tmp_path)["history"]] == [
        each["metrics"] for each in result["history"]
    ]
    assert len(logits(tmp_path)[0]) == 12 * BATCH * 4, "no step is taken again"
    open_end = [word for word in command if not word.startswith("metrics=")]
    open_end.remove("--set")
    last = launcher.start(*open_end, "--resume", "auto")
    assert last.popen.wait(WAIT_SEC) == 0, last.err
    (whole,) = result_in(tmp_path)["history"]
    assert (whole["step"], whole["samples"]) == (STEPS, SAMPLES), "without metrics.stop it trains on the rest"


def test_the_first_worker_of_leased_data_tests_alone(launcher: Launcher, tmp_path: Path) -> None:
    sets = [f"metrics.file={tmp_path}/run.jsonl", "train.test_every={steps: 20}", "train.epochs=1"]
    given = [word for each in sets for word in ("--set", each)]
    process = launcher.start("train", str(write_job(tmp_path)), *given, "--json", str(tmp_path / "result.json"))
    assert process.popen.wait(WAIT_SEC) == 0, process.err
    result, told = result_in(tmp_path), lines(tmp_path, "test")
    assert told, "its steps are at least 20"
    assert [each["step"] for each in told] == [point["step"] for point in result["points"]]
    assert all(each["step"] % 20 == 0 and "label.auc" in each["metrics"] for each in told)
    assert result["history"][0]["samples"] == 4000
