"""The lines of a run and the page that draws them; the decision to stop a run early."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from sparserow.deploy.cli import main
from sparserow.deploy.train import training_display
from sparserow.deploy.train.run_log import RunLog
from sparserow.deploy.train.run_page import page_of
from sparserow.deploy.train.run_report import read_run
from sparserow.proto.config.job import JobConfig
from sparserow.proto.config.metrics_config import StopConfig
from sparserow.proto.options.document import validate
from sparserow.worker.metrics.task_metrics import BinaryMetrics
from sparserow.worker.training.early_stop import EarlyStop, goodness
from sparserow.worker.training.training_checkpoints import Progress
from sparserow.worker.training.training_report import EpochResult, EvaluationPoint, Silence

NAN = float("nan")


def job_of(**metrics: object) -> JobConfig:
    data = {"format": "csv", "train": "a", "test": "b", "csv": {"label": 0}}
    return validate(
        JobConfig,
        {
            "name": "ads",
            "data": data,
            "features": {"c": {"kind": "id", "column": "column_1"}},
            "model": {"class": "DLRM", "args": {"rows": {"*": 1_000_000}}},
            "metrics": metrics,
        },
    )


def epoch(number: int, auc: float) -> EpochResult:
    metrics = {"label.auc": auc, "label.calibration[0,0.1)": 1.0, "label.log_loss": NAN}
    return EpochResult(number, 0.5, 100, 1e4, auc, 0.4, metrics)


def written(path: Path) -> Path:
    with RunLog(job_of(file=str(path)), Silence()) as log:
        log.batch(epoch=1, done=0.5, samples=50, loss=0.7, auc=0.6)
        log.window(1, 60, {"log_loss": 0.65, "calibration[0,0.1)": 1.0})
        log.epoch(epoch(1, 0.7))
        log.window(2, 60, {"log_loss": 0.6})
    with RunLog(job_of(file=str(path)), Silence()) as log:  # it went on from a checkpoint
        log.window(2, 40, {"log_loss": 0.61})
        log.epoch(epoch(2, 0.8))
    return path


def test_the_curves_of_a_run_that_went_on(tmp_path: Path) -> None:
    run = read_run(written(tmp_path / "deep" / "run.jsonl"))
    assert run.job == "ads"
    assert set(run.charts) == {"loss", "auc", "log_loss", "samples per second"}
    windows = run.charts["log_loss"]["progressive"]
    assert (windows.samples, windows.values) == ([60, 140], [0.65, 0.61])
    tests = run.charts["auc"]["test label"]
    assert (tests.samples, tests.values) == ([100, 200], [0.7, 0.8])
    assert run.charts["auc"]["recent samples"].values == [0.6]
    assert "test label" not in run.charts["log_loss"] or not run.charts["log_loss"]["test label"].values, "it is NaN"


def point(number: int, samples: int, auc: float) -> EvaluationPoint:
    return EvaluationPoint(number, samples // 10, samples, auc, 0.4, {"label.auc": auc})


def test_tests_within_epochs_are_points_of_the_same_curve(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLog(job_of(file=str(path)), Silence()) as log:
        log.point(point(1, 40, 0.6))
        log.point(point(1, 80, 0.65))
        log.epoch(epoch(1, 0.7))
        log.point(point(2, 40, 0.72))
        log.point(point(2, 80, 0.73))
    with RunLog(job_of(file=str(path)), Silence()) as log:  # it went on from a checkpoint between the two
        log.point(point(2, 80, 0.74))
        log.point(point(2, 100, 0.75))
        log.epoch(epoch(2, 0.75))
    with RunLog(job_of(file=str(path)), Silence()) as log:  # from one before the last test
        log.point(point(2, 100, 0.76))
        log.epoch(epoch(2, 0.76))
    tests = read_run(path).charts["auc"]["test label"]
    assert tests.samples == [40, 80, 100, 140, 180, 200, 200]
    assert tests.values == [0.6, 0.65, 0.7, 0.72, 0.74, 0.76, 0.76]


def test_a_window_that_is_told_again_beside_progress_at_its_place_is_one(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for loss in (0.6, 0.61):  # killed after the window, and begun again before it
        with RunLog(job_of(file=str(path)), Silence()) as log:
            log.window(1, 60, {"log_loss": loss})
            log.batch(epoch=1, done=0.6, samples=60, loss=0.7, auc=0.6)
    run = read_run(path)
    windows = run.charts["log_loss"]["progressive"]
    assert (windows.samples, windows.values) == ([60], [0.61])
    assert run.charts["auc"]["recent samples"].samples == [60]


def test_progress_that_is_estimated_before_a_window_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for loss in (0.6, 0.61):
        with RunLog(job_of(file=str(path)), Silence()) as log:
            log.window(1, 100, {"log_loss": loss})
            log.batch(epoch=1, done=1.0, samples=99, loss=0.7, auc=0.6)  # worker 0 had 33 of three workers' 100
    windows = read_run(path).charts["log_loss"]["progressive"]
    assert (windows.samples, windows.values) == ([100], [0.61])


def test_an_evaluation_that_is_made_again_leaves_the_window_at_its_place(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLog(job_of(file=str(path)), Silence()) as log:
        log.window(1, 100, {"log_loss": 0.6})
        log.epoch(epoch(1, 0.7))
    with RunLog(job_of(file=str(path)), Silence()) as log:
        log.epoch(epoch(1, 0.71))
    charts = read_run(path).charts
    assert charts["log_loss"]["progressive"].samples == [100]
    assert charts["auc"]["test label"].values == [0.71]


def test_a_run_that_goes_on_in_a_new_file_has_its_points_where_they_are(tmp_path: Path) -> None:
    """As where the machine of the run before is gone, with its file."""
    path = tmp_path / "run.jsonl"
    with RunLog(job_of(file=str(path)), Silence()) as log:
        log.goes_on([epoch(1, 0.7), epoch(2, 0.7)])
        log.window(3, 60, {"log_loss": 0.6})
        log.epoch(epoch(3, 0.8))
    charts = read_run(path).charts
    assert charts["log_loss"]["progressive"].samples == [260]
    assert charts["auc"]["test label"].samples == [300]


def test_the_samples_of_all_are_those_of_the_workers_that_there_were() -> None:
    four = [Progress(samples=100) for _ in range(4)]
    first, second = Progress(), Progress()
    first.join(four, is_first=True)
    second.join(four, is_first=False)
    first.samples += 10
    assert first.samples_of_all(2) == 420
    assert second.samples == 0
    first.begin_epoch(2)
    first.samples += 10
    assert first.samples_of_all(2) == 20


def test_a_page_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    path = written(tmp_path / "run.jsonl")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(path)])
    assert not ended.value.code
    page = (tmp_path / "run.html").read_text()
    assert "run.html" in capsys.readouterr().out
    assert 'src="http' not in page
    assert "progressive" in page
    assert "ads (run.jsonl)" in page
    assert page_of(read_run(path), "x").count("samples per second") > 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[1]", "line 2: it is no entry of a run"),
        ('{"kind": "epoch", "epoch": "x", "samples": 1}', "line 2: invalid literal"),
        ('{"kind": "epoch", "epoch": 1}', "line 2: 'samples'"),
        ("[" * 100_000, "line 2: "),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"kind": "run", "job": "a"}) + "\n" + line + "\n")
    with pytest.raises(sr.errors.DataLoss, match=message):
        read_run(path)


def test_a_run_without_lines_is_named(tmp_path: Path) -> None:
    with pytest.raises(sr.errors.NotFound, match="there is no such file"):
        read_run(tmp_path / "none.jsonl")
    (tmp_path / "run.jsonl").write_text('{"kind": "run", "job": "a"}\n')
    with pytest.raises(sr.errors.InvalidArgument, match="no progress and no epoch yet"):
        read_run(tmp_path / "run.jsonl")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(sr.errors.FailedPrecondition, match=r"metrics\.file: .* cannot be written"):
        RunLog(job_of(file=str(tmp_path / "file" / "run.jsonl")), Silence())


@pytest.mark.parametrize(
    ("after", "values", "stops_after"),
    [(1, [0.7, 0.69], 2), (2, [0.7, 0.6, 0.71, 0.7, 0.7], 5), (2, [0.7, 0.6], None), (1, [0.7, 0.705], 2)],
)
def test_a_run_stops_after_epochs_that_are_no_better(after: int, values: list[float], stops_after: int | None) -> None:
    stop = EarlyStop(StopConfig(metric="label.auc", after=after, least_gain=0.009))
    seen = None
    for number, value in enumerate(values, 1):
        assert seen is None
        stop.add(epoch(number, value))
        seen = number if stop.is_over else None
    assert seen == stops_after
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"metrics\.stop\.metric: there is no metric 'x\.auc'; there are"
    ):
        EarlyStop(StopConfig(metric="x.auc")).add(epoch(1, 0.5))
    assert not EarlyStop(None).is_over


@pytest.mark.parametrize(
    ("labels", "group_gauc", "line"),
    [
        ([1, 1, 1], NAN, "test click.auc none (the test data have one class alone), click.log_loss 0.6931"),
        ([1, 0, 1], NAN, "click.gauc none (no group of the test data has both classes)"),
        ([1, 0, 1], 0.5, "click.gauc 0.5000"),
    ],
)
def test_a_metric_that_the_test_data_do_not_give_is_told_with_the_reason(
    labels: list[int], group_gauc: float, line: str
) -> None:
    made = BinaryMetrics()
    made.add(np.zeros(3, np.float32), np.array(labels, np.float32))
    metrics = {f"click.{name}": value for name, value in made.results().items()}
    result = EpochResult(1, 0.5, 100, 1e4, metrics["click.auc"], metrics["click.log_loss"], metrics)
    if labels == [1, 1, 1]:
        assert training_display.tested(result) == "test AUC none (the test data have one class alone), log-loss 0.6931"
        for setting in ("metrics.best", "metrics.stop.metric"):
            with pytest.raises(
                sr.errors.InvalidArgument, match=f"{setting}: click.auc is not defined, as the test data have one"
            ):
                goodness(setting, "click.auc", result)
    assert line in training_display.tested(replace(result, metrics={**metrics, "click.gauc": group_gauc}))
