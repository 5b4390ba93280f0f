"""``train.parallel`` of a job file: towers in parts against DDP, a checkpoint on other processes, the kept model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparserow.worker.data import write_click_log
from sparserow_process import Launcher, wait_until

JOB = Path(__file__).resolve().parents[2] / "deploy" / "jobs" / "demo.yaml"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_click_log(tmp_path_factory.mktemp("log"), rows=3_000, test_rows=701, seed=3)


def settings_of(log: Any, *sets: str) -> list[str]:
    """The last step of an epoch has short and empty batches."""
    settings = [
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.args.rows={'*': 5000}",
        "model.min_rows=1",
        "model.min_rows=100",
    ]
    settings += ["train.batch_size=96", "train.accumulate=2", "train.epochs=2", "train.threads=1", *sets]
    return [part for setting in settings for part in ("--set", setting)]


def train(
    launcher: Launcher, log: Any, result: Path, *sets: str, resume: str = "never", keeps: bool = False
) -> dict[str, Any]:
    """Runs the job and returns its result."""
    assigned = settings_of(log, *sets)
    run = launcher.start("train", str(JOB), *assigned, "--json", str(result), "--resume", resume, keeps=keeps)
    assert run.popen.wait(120) == 0, run.err
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def test_towers_in_parts_give_the_figures_of_ddp(launcher: Launcher, log: Any, tmp_path: Path) -> None:
    """Four processes in two groups, of whose checkpoint after the first epoch two other processes go on."""
    same = ["train.clip_norm=0.5", "train.prefetch=2"]
    wanted = train(launcher, log, tmp_path / "ddp.json", *same, "train.workers=2")
    saved = f"train.checkpoint={{url: {tmp_path / 'saved'}, every_steps: 7, keep: 9}}"
    parts = train(
        launcher,
        log,
        tmp_path / "parts.json",
        *(*same, "train.workers=4", "train.parallel={shard: all, tensor: 2}", saved),
        f"publish.local={tmp_path / 'kept'}",
        keeps=True,
    )
    assert_same(parts, wanted)
    assert parts["workers"] == 2
    (program,) = (tmp_path / "kept").rglob("*.pt2")
    assert program.stat().st_size > 0
    names = sorted(path.name for path in (tmp_path / "saved").glob("save-*"))
    assert all((tmp_path / "saved" / name / "dense").is_dir() for name in names)
    gone_on = train(
        launcher,
        log,
        tmp_path / "gone_on.json",
        *(*same, "train.workers=2", "train.parallel={shard: all}", "metrics.best=label.log_loss", saved),
        resume=names[0],
    )
    assert_same(gone_on, wanted)
    assert gone_on["best_epoch"] == 2, "a checkpoint was saved after the evaluation"


@pytest.mark.full
def test_the_best_model_comes_back_where_ranks_have_it_in_parts(launcher: Launcher, log: Any, tmp_path: Path) -> None:
    rates = ["train.row_optimizer.lr=1.0", "train.dense_optimizer.lr=0.05", "train.epochs=4"]
    best = [f"train.checkpoint={{url: {tmp_path / 'saved'}, every_steps: 7}}", "metrics.best=label.log_loss"]
    parts = ["train.workers=2", "train.parallel={shard: all}"]
    figures = train(launcher, log, tmp_path / "parts.json", *rates, *best, *parts)
    losses = [epoch["test_log_loss"] for epoch in figures["history"]]
    assert figures["best_epoch"] - 1 == losses.index(min(losses)) < len(losses) - 1
    assert figures["test_log_loss"] == min(losses)


@pytest.mark.full
@pytest.mark.parametrize(
    "sets",
    [
        ("train.amp=bfloat16",),
        ("train.amp=float16", "train.clip_norm=0.5"),
        ("train.activation_checkpointing=true", "train.cache.bytes=1MiB"),
        ("train.staleness=1",),
    ],
)
def test_one_group_trains_as_one_process(launcher: Launcher, log: Any, tmp_path: Path, sets: tuple[str, ...]) -> None:
    same = ["model={class: DeepFM, args: {rows: {'*': 5000}, hidden: [64, 32]}, min_rows: 1}", "train.epochs=1", *sets]
    wanted = train(launcher, log, tmp_path / "one.json", *same)
    figures = train(launcher, log, tmp_path / "group.json", *same, "train.workers=2", "train.parallel={tensor: 2}")
    within = 1e-6 if "train.activation_checkpointing=true" in sets else 2e-2
    assert figures["workers"] == 1
    assert_same(figures, wanted, within)


@pytest.mark.full
def test_a_killed_follower_sends_all_back_to_the_checkpoint(launcher: Launcher, log: Any, tmp_path: Path) -> None:
    sets = ["train.epochs=8", "train.workers=4", "train.parallel={shard: all, tensor: 2}"]
    wanted = train(launcher, log, tmp_path / "whole.json", *sets)
    sets.append(f"train.checkpoint={{url: {tmp_path / 'saved'}, every_steps: 20}}")
    result = tmp_path / "killed.json"
    run = launcher.start("train", str(JOB), *settings_of(log, *sets), "--json", str(result), "--resume", "auto")
    wait_until(lambda: list((tmp_path / "saved").glob("save-*/manifest.json")), "the first checkpoint")
    workers = [each for each in launcher.living() if any("worker_process" in word for word in each.cmdline())]
    workers.sort(key=lambda worker: worker.create_time())  # they are started in the order of their ranks
    workers[1].kill()
    assert run.popen.wait(200) == 0, run.err
    assert "the run begins again from the last checkpoint" in run.err
    assert_same(json.loads(result.read_text()), wanted)


def assert_same(figures: dict[str, Any], wanted: dict[str, Any], within: float = 1e-6) -> None:
    for mine, other in zip(figures["history"], wanted["history"], strict=True):
        for name in ("train_loss", "test_auc", "test_log_loss"):
            assert mine[name] == pytest.approx(other[name], abs=within), name
        assert mine["samples"] == other["samples"]
