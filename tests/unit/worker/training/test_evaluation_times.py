"""``train.test_every``: after which steps a model is tested, what the tests decide, and that they change nothing."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import sparserow as sr
from sparserow.proto.checkpoint.best import BestCheckpoint, best_in
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.training import best_model, evaluation_times
from sparserow.worker.training.best_model import BestModel
from sparserow.worker.training.evaluation_times import EvaluationTimes, in_order
from sparserow.worker.training.local_backend import LocalBackend
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_checkpoints import Progress
from sparserow.worker.training.training_report import EpochResult, EvaluationPoint, Silence

SAMPLES, BATCH = 610, 64  # 10 steps an epoch, the last one of 34 samples
STEPS = 10


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = torch.Generator().manual_seed(1)
    keys = torch.randint(0, 20, (SAMPLES, 2), generator=draw)
    labels = (torch.rand(SAMPLES, generator=draw) < torch.where(keys.sum(1) % 2 == 1, 0.9, 0.1)).int()
    path = tmp_path_factory.mktemp("log") / "log.csv"
    path.write_text("".join(f"{y},{u},{i}\n" for y, (u, i) in zip(labels.tolist(), keys.tolist(), strict=True)))
    return path


def job_of(path: Path | str, *sets: str) -> JobConfig:
    common = [
        "data.format=csv",
        "data.csv={columns: [click, user, item], label: click}",
        "features={user: {kind: id, modulo: 20}, item: {kind: id, modulo: 20}}",
        "model={class: 'own_models:Noisy', backend: local, args: {rows: 20}, min_rows: 1}",
        f"train.batch_size={BATCH}",
        "train.epochs=2",
        "train.row_optimizer={kind: adagrad, lr: 0.1}",
        "train.dense_optimizer={kind: adam, lr: 0.01}",
        "tasks={click: {}}",
    ]
    return load_config(JobConfig, None, [f"data.train={path}", f"data.test={path}", *common, *sets])


class Recorder(Silence):
    """Keeps the results in the order of their reports."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def point(self, result: EvaluationPoint) -> None:
        self.results.append(result)

    def epoch(self, result: EpochResult) -> None:
        self.results.append(result)


def trained(job: JobConfig, observer: Silence | None = None) -> tuple[Trainer, Any]:
    trainer = Trainer(job, group=WorkerGroup(), backend=LocalBackend(job.train), observer=observer or Silence())
    return trainer, trainer.run()


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def figures(result: Any) -> list[Any]:
    return [{name: value for name, value in asdict(each).items() if name != "samples_per_sec"} for each in result]


@pytest.mark.parametrize("every", ["steps: 1", "steps: 4", "samples: 200", "seconds: 0.000001"])
def test_tests_within_epochs_change_no_bit_of_what_is_trained(log: Path, every: str) -> None:
    plain, wanted = trained(job_of(log))
    tested, found = trained(job_of(log, f"train.test_every={{{every}}}"))
    mine, others = weights(tested), weights(plain)
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)
    assert [each.train_loss for each in found.history] == [each.train_loss for each in wanted.history]
    assert tested.model.training is plain.model.training
    assert found.points


def test_points_are_where_the_job_says(log: Path) -> None:
    recorder = Recorder()
    _, result = trained(job_of(log, "train.test_every={steps: 4}"), recorder)
    assert [(each.epoch, each.step, each.samples) for each in result.points] == [
        (1, 4, 256), (1, 8, 512), (2, 12, 128), (2, 16, 384), (2, 20, SAMPLES)
    ]  # fmt: skip
    assert [each.step for each in result.history] == [STEPS, 2 * STEPS]
    assert [(type(each), each.epoch) for each in recorder.results] == [
        *[(EvaluationPoint, 1)] * 2, (EpochResult, 1), *[(EvaluationPoint, 2)] * 3, (EpochResult, 2)
    ]  # fmt: skip
    last, end = result.points[-1], result.history[-1]
    assert (last.metrics, last.test_auc, last.test_log_loss) == (end.metrics, end.test_auc, end.test_log_loss), (
        "the last step of an epoch is tested once"
    )
    assert {"click.auc", "click.log_loss"} <= result.points[0].metrics.keys()
    assert result.points[0].test_auc != result.points[1].test_auc
    _, by_samples = trained(job_of(log, "train.test_every={samples: 200}"))
    assert figures(by_samples.points) == figures(result.points), "200 samples are rounded up to 4 steps of 64"


def test_a_point_is_the_test_that_a_shorter_run_ends_with(log: Path, tmp_path: Path) -> None:
    _, result = trained(job_of(log, "train.epochs=1", "train.test_every={steps: 4}", "data.shuffle_rows=0"))
    begin = tmp_path / "begin.csv"
    begin.write_text("".join(log.read_text().splitlines(keepends=True)[: 4 * BATCH]))
    sets = [f"data.train={begin}", "train.epochs=1", "data.shuffle_rows=0", "model.args.rows=20"]
    _, short = trained(job_of(log, *sets, f"data.test={log}"))
    assert result.points[0].samples == short.history[0].samples
    quiet = {name for name in short.history[0].metrics if "[" not in name}
    for name in quiet:  # its forward draws other numbers
        assert result.points[0].metrics[name] == pytest.approx(short.history[0].metrics[name], abs=0.02), name


def test_a_job_of_one_epoch_stops_within_it(log: Path) -> None:
    stop = "metrics.stop={metric: click.auc, after: 2, least_gain: 0.5}"
    recorder = Recorder()
    _, result = trained(job_of(log, "train.epochs=1", "train.test_every={steps: 2}", stop), recorder)
    assert [each.step for each in result.points] == [2, 4, 6], "the first test is the best; two are no better"
    (end,) = result.history
    assert (end.epoch, end.step, end.samples) == (1, 6, 6 * BATCH)
    assert end.metrics == result.points[-1].metrics == result.metrics
    assert (result.epochs, result.test_auc) == (1, end.test_auc)
    assert recorder.results[-1] == end


def test_a_test_of_the_last_step_counts_once(log: Path) -> None:
    stop = "metrics.stop={metric: click.auc, after: 2, least_gain: 0.5}"
    _, result = trained(job_of(log, "train.epochs=4", f"train.test_every={{steps: {STEPS}}}", stop))
    assert [each.epoch for each in result.history] == [1, 2, 3]
    assert [each.step for each in result.points] == [10, 20, 30]


def times(every: str, group: WorkerGroup, *sets: str) -> EvaluationTimes:
    return EvaluationTimes(job_of("a", f"train.test_every={{{every}}}", *sets).train, group)


def test_samples_are_those_of_all_workers() -> None:
    for samples, world, accumulate, steps in ((1, 1, 1, 1), (64, 1, 1, 1), (65, 1, 1, 2), (1000, 3, 2, 3)):
        found = times(f"samples: {samples}", WorkerGroup(0, world), f"train.accumulate={accumulate}")
        due = [number for number in range(1, 10) if found.is_due(number, is_over=False)]
        assert due == list(range(steps, 10, steps)), (samples, world)


def test_the_clock_is_that_of_the_first_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(evaluation_times.time, "monotonic", lambda: now[0])
    first, other = (times("seconds: 5", WorkerGroup(rank, 2)) for rank in range(2))
    assert not first.is_over
    now[0] = 105.0
    assert (first.is_over, other.is_over) == (True, False)
    assert first.is_due(7, is_over=True)
    assert other.is_due(7, is_over=True), "it follows what all agreed on"
    assert not first.is_due(7, is_over=False)
    first.restart()
    assert not first.is_over


def test_workers_that_do_not_meet_leave_tests_to_the_first() -> None:
    first, other = (times("steps: 3", WorkerGroup(rank, 2, meets=False)) for rank in range(2))
    assert first.is_due(3, is_over=False)
    assert not other.is_due(3, is_over=False)
    without = EvaluationTimes(job_of("a").train, WorkerGroup())
    assert not without.is_due(3, is_over=False)
    assert not without.is_over


def point(epoch: int, step: int, loss: float) -> EvaluationPoint:
    return EvaluationPoint(epoch, step, step * 10, math.nan, loss, {"click.log_loss": loss})


def end(epoch: int, step: int, loss: float) -> EpochResult:
    return EpochResult(epoch, 0.5, 100, 1.0, math.nan, loss, {"click.log_loss": loss}, step)


def test_evaluations_have_the_order_in_which_they_were_made() -> None:
    ends = [end(1, 10, 0.5), end(2, 20, 0.4)]
    points = [point(1, 4, 0.7), point(1, 8, 0.6), point(2, 20, 0.4), point(3, 24, 0.3)]
    assert in_order(ends, points) == [points[0], points[1], ends[0], ends[1], points[3]]
    assert in_order([], []) == []


class Checkpoints:
    """Stands for the checkpoints of a run."""

    def __init__(self, folder: Path, names: list[str], resumed: str | None) -> None:
        from sparserow.proto.checkpoint.folder import Folder

        self.folder, self.names, self.resumed = Folder(str(folder)), names, resumed
        self.loaded: list[str] = []

    def save_now(self, progress: Progress) -> str:  # noqa: ARG002 - as the real one
        self.names.append(f"save-{len(self.names):06}")
        return self.names[-1]

    def load(self, name: str) -> None:
        self.loaded.append(name)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    names: list[str] = []
    monkeypatch.setattr(best_model, "list_names", lambda _: list(names))

    def make(resumed: str | None = None) -> tuple[BestModel, Checkpoints]:
        checkpoints = Checkpoints(tmp_path, names, resumed)
        return BestModel("click.log_loss", checkpoints, WorkerGroup()), checkpoints  # type: ignore[arg-type]

    return make


def test_the_best_test_within_an_epoch_is_kept_and_known_again(made: Any) -> None:
    best, checkpoints = made()
    best.begin(Progress(), [])
    tests = [point(1, 4, 0.5), point(1, 8, 0.3), end(1, 10, 0.4)]
    for each in tests:
        best.add(each, Progress(samples=5))
    wanted = BestCheckpoint("save-000001", 1, "click.log_loss", 0.3, 8)
    assert best.kept == best_in(checkpoints.folder) == wanted
    best.bring_back(tests)
    assert checkpoints.loaded == ["save-000001"]
    again, _ = made("save-000001")
    again.begin(Progress(samples=80, is_tested=True), tests[:2])
    assert again.kept == wanted
    earlier, _ = made("save-000000")
    earlier.begin(Progress(samples=40, is_tested=True), tests[:1])  # it went back before the best test
    assert earlier.kept == BestCheckpoint("save-000000", 1, "click.log_loss", 0.5, 4)


def test_a_run_killed_between_a_checkpoint_within_an_epoch_and_its_note_finds_it(made: Any) -> None:
    first, checkpoints = made()
    first.begin(Progress(), [])
    first.add(point(1, 4, 0.5), Progress(samples=5))
    checkpoints.names.append("save-000001")  # of the test after step 8, without a note
    again, _ = made("save-000001")
    again.begin(Progress(samples=80, is_tested=True), [point(1, 4, 0.5), point(1, 8, 0.3)])
    assert again.kept == BestCheckpoint("save-000001", 1, "click.log_loss", 0.3, 8)
    other, _ = made("save-000001")
    other.begin(Progress(samples=90), [point(1, 4, 0.5), point(1, 8, 0.2)])  # it is of a later step
    assert other.kept is None or other.kept.value != 0.2


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.test_every={}"], "train.test_every: none of steps, samples and seconds given; allowed: exactly one"),
        (["train.test_every={steps: 5, seconds: 1min}"], "train.test_every: steps and seconds given; allowed: exactly"),
        (["train.test_every={steps: 0}"], "train.test_every.steps: 0 is not allowed; allowed: an integer >= 1"),
        (["train.test_every={samples: 1.5}"], "train.test_every.samples: 1.5 is not allowed"),
        (["train.test_every={seconds: 0s}"], "train.test_every.seconds: .*0.* is not allowed"),
        (["train.test_every={epochs: 1}"], "train.test_every.epochs: unknown key"),
        (["train.test_every=5"], "train.test_every: 5 is not allowed; allowed: a section with exactly one of steps"),
        (
            ["model.backend=ps", "train.dense=ps", "train.quorum=1", "train.test_every={steps: 5}"],
            "train.test_every: is not possible with train.quorum, as the worker that tests would pass over",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(sets: list[str], message: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        job_of("a", *sets)
