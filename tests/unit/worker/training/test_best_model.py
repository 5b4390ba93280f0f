"""The rule of ``metrics.best``: which checkpoint is the best one, also after a run was killed or went back."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest

import sparserow as sr
from sparserow.proto.checkpoint.best import BEST_FILE, BestCheckpoint, best_in, note_best
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.training import best_model
from sparserow.worker.training.best_model import BestModel
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.training_checkpoints import Progress
from sparserow.worker.training.training_report import EpochResult


class Checkpoints:
    """Stands for the checkpoints of a run: names of saves, and which one was restored."""

    def __init__(self, folder: Path, names: list[str], resumed: str | None = None) -> None:
        self.folder, self.names, self.resumed = Folder(str(folder)), names, resumed
        self.fails = False
        self.loaded: list[str] = []

    def save_now(self, progress: Progress) -> str | None:
        assert progress.samples == 0
        if self.fails:
            return None
        self.names.append(f"save-{len(self.names):06}")
        return self.names[-1]

    def load(self, name: str) -> None:
        if name not in self.names:
            raise sr.errors.NotFound(f"no checkpoint {name}")
        self.loaded.append(name)


def result(epoch: int, loss: float) -> EpochResult:
    return EpochResult(epoch, 0.5, 10, 1.0, math.nan, loss, {"click.log_loss": loss})


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the best model of a run over the names of its checkpoints."""
    names: list[str] = []
    monkeypatch.setattr(best_model, "list_names", lambda _: list(names))

    def make(resumed: str | None = None) -> tuple[BestModel, Checkpoints]:
        checkpoints = Checkpoints(tmp_path, names, resumed)
        return BestModel("click.log_loss", checkpoints, WorkerGroup()), checkpoints  # type: ignore[arg-type]

    return make


def test_the_best_is_saved_noted_and_brought_back(made: Any) -> None:
    best, checkpoints = made()
    best.begin(Progress(), [])
    history = [result(1, 0.6), result(2, math.nan), result(3, 0.5), result(4, 0.5), result(5, 0.7)]
    for each in history:
        best.add(each, Progress(each.epoch + 1))
    assert checkpoints.names == ["save-000000", "save-000001"], "an equal value is not better, and NaN never is"
    wanted = BestCheckpoint("save-000001", 3, "click.log_loss", 0.5)
    assert best.kept == best_in(checkpoints.folder) == wanted
    best.bring_back(history[:3])
    assert checkpoints.loaded == [], "rows and model are those of the last epoch"
    best.bring_back(history)
    assert checkpoints.loaded == ["save-000001"]


def test_a_run_that_goes_on_knows_the_best(made: Any) -> None:
    first, _ = made()
    first.begin(Progress(), [])
    first.add(result(1, 0.5), Progress(2))
    again, checkpoints = made("save-000009")
    again.begin(Progress(epoch=3, samples=50), [result(1, 0.5), result(2, 0.6)])
    assert again.kept == first.kept
    again.add(result(3, 0.55), Progress(4))
    assert checkpoints.names == ["save-000000"]
    again.add(result(4, 0.4), Progress(5))
    assert again.kept.epoch == 4


def test_a_run_killed_between_a_checkpoint_and_its_note_finds_it(made: Any) -> None:
    first, checkpoints = made()
    first.begin(Progress(), [])
    first.add(result(1, 0.5), Progress(2))
    checkpoints.names.append("save-000001")  # of epoch 2, without a note
    again, _ = made("save-000001")
    again.begin(Progress(epoch=3), [result(1, 0.5), result(2, 0.4)])
    assert again.kept == best_in(checkpoints.folder) == BestCheckpoint("save-000001", 2, "click.log_loss", 0.4)


@pytest.mark.parametrize(
    ("noted", "position"),
    [
        (BestCheckpoint("save-000000", 5, "click.log_loss", 0.3), Progress(epoch=3, samples=7)),  # of a later epoch
        (BestCheckpoint("save-000000", 1, "click.log_loss", 0.3), Progress(epoch=3, samples=7)),  # of another run
        (BestCheckpoint("save-000000", 1, "click.auc", 0.5), Progress(epoch=3, is_trained=True)),  # another metric
        (BestCheckpoint("save-000077", 1, "click.log_loss", 0.5), Progress(epoch=3, samples=7)),  # which is gone
    ],
)
def test_a_note_that_does_not_fit_is_not_taken_over(made: Any, noted: BestCheckpoint, position: Progress) -> None:
    best, checkpoints = made("save-000000")
    checkpoints.names.append("save-000000")
    note_best(checkpoints.folder, noted)
    best.begin(position, [result(1, 0.5), result(2, 0.6)])
    assert best.kept is None
    assert best_in(checkpoints.folder) == noted, "its checkpoint stays until there is a better one"
    best.add(result(3, 0.9), Progress(4))
    assert best_in(checkpoints.folder) == best.kept == BestCheckpoint("save-000001", 3, "click.log_loss", 0.9)


def test_a_new_run_forgets_the_note_of_another(made: Any) -> None:
    best, checkpoints = made()
    note_best(checkpoints.folder, BestCheckpoint("save-000004", 1, "click.log_loss", 0.1))
    best.begin(Progress(), [])
    assert best_in(checkpoints.folder) is None


def test_a_save_that_fails_leaves_the_former_best(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    best, checkpoints = made()
    best.begin(Progress(), [])
    with pytest.raises(sr.errors.FailedPrecondition, match=r"metrics\.best: no model was kept"):
        best.bring_back([])
    best.add(result(1, 0.6), Progress(2))
    checkpoints.fails = True
    with caplog.at_level(logging.WARNING):
        best.add(result(2, 0.4), Progress(3))
    assert "the model of epoch 2 is not kept" in caplog.text
    assert best.kept.epoch == 1
    checkpoints.fails = False
    best.add(result(3, 0.5), Progress(4))
    assert best.kept.epoch == 3, "it is better than what was kept"
    checkpoints.names.clear()
    with pytest.raises(
        sr.errors.FailedPrecondition, match=r"that of epoch 3, could not be restored: .*stays in the checkpoint"
    ):
        best.bring_back([result(4, 0.9)])


@pytest.mark.parametrize(
    "note",
    ["", "[]", '{"name": "../x", "epoch": 1, "metric": "a.b", "value": 1.0}', '{"name": "save-000001", "epoch": 1}',
     '{"name": "save-000001", "epoch": 1, "metric": "a.b", "value": NaN}'],
)  # fmt: skip
def test_a_damaged_note_is_none(tmp_path: Path, note: str) -> None:
    (tmp_path / BEST_FILE).write_text(note)
    assert best_in(Folder(str(tmp_path))) is None


CHECKPOINT = "train.checkpoint={url: /c, every_steps: 1}"


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["metrics.best=label.auc"], "metrics.best: needs train.checkpoint"),
        (
            [CHECKPOINT, "metrics.best=click.auc"],
            "metrics.best: 'click.auc' is not allowed; allowed: label.auc, label.",
        ),
        ([CHECKPOINT, "metrics.best=label.gauc"], "metrics.best: 'label.gauc' is not allowed; allowed: label.auc"),
        ([CHECKPOINT, "metrics.best=label.calibration"], "metrics.best: 'label.calibration' is not allowed"),
        (
            [CHECKPOINT, "metrics.best=auc"],
            "metrics.best: 'auc' is not allowed; allowed: label.auc, label.log_loss",
        ),
        ([CHECKPOINT, "metrics.best=label.auc", "train.dense=ps"], "metrics.best: needs train.dense ddp"),
        (
            [CHECKPOINT, "metrics.best=label.auc", "train.cache.bytes=1MiB", "train.staleness=4"],
            "metrics.best: is not possible with train.cache",
        ),
        (["metrics.stop={metric: click.auc}"], "metrics.stop.metric: 'click.auc' is not allowed"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(sets: list[str], message: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        load_config(
            JobConfig,
            None,
            ["data.train=a", "data.test=b", "model={class: DLRM, args: {rows: {'*': 1000000}}}", *sets],
        )


@pytest.mark.parametrize(("metric", "is_right"), [("next.ndcg@5", True), ("next.ndcg@10", False), ("next.mrr", True)])
def test_the_k_of_a_metric_is_one_that_is_measured(tmp_path: Path, metric: str, is_right: bool) -> None:
    sets = ["data.train=a", "data.test=b", "model.class=SASRec", "tasks={next: {loss: softmax}}", "metrics.at=[5]"]
    stop = f"metrics.stop={{metric: {metric}}}"
    if is_right:
        load_config(JobConfig, None, [*sets, stop])
        return
    words = r"metrics\.stop\.metric: 'next\.ndcg@10' is not allowed; allowed: .*next\.hit_rate@5, next\.ndcg@5"
    with pytest.raises(sr.errors.InvalidArgument, match=words):
        load_config(JobConfig, None, [*sets, stop])


def test_a_metric_that_is_not_measured_ends_the_job(made: Any) -> None:
    best, _ = made()
    best.begin(Progress(), [])
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"metrics\.best: there is no metric 'click\.log_loss'; there are: a\.b"
    ):
        best.add(EpochResult(1, 0.5, 10, 1.0, 0.5, 0.5, {"a.b": 1.0}), Progress(2))
