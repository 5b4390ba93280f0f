"""The trainer on plain torch: what it learns, what it reports, what it refuses. (e2e tests run it on servers.)"""

from __future__ import annotations

import io
import math
import re

import pytest
import torch
from rich.console import Console

from sparserow.deploy.train.training_display import summary
from sparserow.proto.config.job import JobConfig
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.options.document import load_config
from sparserow.worker.data import BadLine
from sparserow.worker.data.sources import fit_features
from sparserow.worker.training.build_model import build_model
from sparserow.worker.training.local_backend import LocalBackend
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence

FEATURES = "features={x: {kind: dense, scale: standardize}, c: {kind: id}}"


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: threads would only fight for the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def log(tmp_path):
    """The key decides the label: even keys 0.1, odd keys 0.9."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 20, (2000,), generator=generator)
    labels = (torch.rand(2000, generator=generator) < torch.where(keys % 2 == 1, 0.9, 0.1)).int()
    path = tmp_path / "log.csv"
    path.write_text("".join(f"{y},{i % 10},k{k}\n" for i, (y, k) in enumerate(zip(labels, keys, strict=True))))
    return path


def job_of(path, *sets: str) -> JobConfig:
    common = [
        "data.format=csv",
        "data.csv={columns: [y, x, c], label: y}",
        FEATURES,
        "model={class: DeepFM, backend: local, args: {rows: {'*': 4096}, dim: 4}, min_rows: 1}",
    ]
    common += ["train.batch_size=64", "train.epochs=3", "train.row_optimizer={kind: adagrad, lr: 0.1}"]
    return load_config(JobConfig, None, [f"data.train={path}", f"data.test={path}", *common, *sets])


class Recorder(Silence):
    def __init__(self):
        self.epochs = []

    def epoch(self, result):
        self.epochs.append(result)


def train(job: JobConfig, observer=None):
    return Trainer(job, group=WorkerGroup(), backend=LocalBackend(job.train), observer=observer or Silence()).run()


@pytest.mark.parametrize("model", ["DeepFM", "DLRM"])
def test_it_learns_and_reports(log, model):
    recorder = Recorder()
    result = train(job_of(log, f"model.class={model}"), recorder)
    assert result.test_auc > 0.88  # 0.9 is what the labels allow
    assert result.test_log_loss < 0.40  # their entropy is 0.325
    assert (result.epochs, result.workers, result.shards, result.bad_lines, result.rows) == (3, 1, 0, 0, 4096)
    assert [epoch.samples for epoch in result.history] == [2000] * 3
    assert result.history[-1].test_auc == result.test_auc
    assert tuple(recorder.epochs) == result.history
    assert result.samples_per_sec > 0
    assert result.as_dict()["history"][0]["epoch"] == 1


def test_the_seed_decides(log):
    first, again, other = (train(job_of(log, f"train.seed={seed}", "model.args.dropout=0.3")) for seed in (1, 1, 2))
    assert [e.train_loss for e in first.history] == [e.train_loss for e in again.history]
    assert first.test_log_loss == again.test_log_loss != other.test_log_loss


def test_learning_rates_decay(log):
    job = job_of(log, "train.schedule={kind: step, every_epochs: 1, factor: 0.5}")
    backend = LocalBackend(job.train)
    Trainer(job, group=WorkerGroup(), backend=backend, observer=Silence()).run()
    rates = [group["lr"] for optimizer in backend.optimizers for group in optimizer.param_groups]
    assert rates == [pytest.approx(0.00025), pytest.approx(0.025)]


@pytest.mark.parametrize("rows", ["{kind: sgd, lr: 0.1, momentum: 0.5}", "{kind: adagrad, initial_accumulator: 0.1}"])
@pytest.mark.parametrize("dense", ["adam", "adamw", "adagrad", "sgd"])
def test_every_optimizer_runs(log, rows, dense):
    sets = (f"train.row_optimizer={rows}", f"train.dense_optimizer={{kind: {dense}, lr: 0.01}}", "train.epochs=1")
    assert train(job_of(log, *sets)).history[0].train_loss < 0.8


def test_bad_lines_stop_or_are_counted(log):
    log.write_text(log.read_text() + "1,1,k,extra\n0,one,k\n")
    with pytest.raises(BadLine, match=r"log.csv, line 2001: 4 columns"):
        train(job_of(log))
    result = train(job_of(log, "data.on_bad_line=skip"))
    assert result.bad_lines == 4  # two in one pass over the training file, two in one over the same test file
    assert "line 2001" in (result.first_bad_line or "")


def test_nothing_to_train_on(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("what\never\n")
    with pytest.raises(InvalidArgument, match="no good line was read"):
        train(job_of(path, "data.on_bad_line=skip"))


def test_divergence_is_an_error(log):
    sets = ("train.dense_optimizer={kind: sgd, lr: 1000}", "train.row_optimizer={kind: sgd, lr: 1000}")
    with pytest.raises(InvalidArgument, match=r"the loss is (nan|inf) after .* samples; lower the learning rates"):
        train(job_of(log, *sets))


def test_refused_steps_are_in_the_summary(log):
    log.write_text(log.read_text() + "1,3e38,k1\n")
    plain = ("features.x.scale=none", "train.epochs=1")
    with pytest.raises(
        InvalidArgument, match=r"the loss is (nan|inf) after .* samples; lower the learning rates, or sk"
    ):
        train(job_of(log, *plain))
    result = train(job_of(log, *plain, "train.on_nonfinite=skip"))
    assert result.refused_steps == 1
    console = Console(file=io.StringIO(), width=100)
    console.print(summary("trained", result))
    assert re.search(r"steps refused \(NaN or Inf\) .* 1\b", console.file.getvalue())


def test_rows_of_features_that_no_argument_names(log):
    features = "features={x: {kind: dense}, c: {kind: id}, k: {kind: id, column: c}, b: {kind: bucketize, column: x,"
    features += " quantiles: 4}}"

    def rows_of(*sets: str) -> dict[str, int]:
        job = job_of(log, features, *sets)
        model = build_model(job.model, fit_features(job.data).spec)
        assert model.embeddings.numbers == ("x",)
        return {name: table.num_embeddings for name, table in model.embeddings.tables.items()}

    assert rows_of("model.args.rows={'*': 7}") == {"c": 7, "k": 7, "b": 5}, "four buckets and one for a missing number"
    assert rows_of("model.args.rows={k: 9, '*': 7}") == {"k": 9, "c": 7, "b": 5}
    assert rows_of("model.args={rows: {c: 7, b: 90}, shared: {k: c}}") == {"c": 7, "b": 90}
    assert rows_of("model.args={rows: {'*': 7}, shared: {k: c}}") == {"c": 7, "b": 5}
    for sets, message in (
        ("model.args.rows={d: 7, '*': 7}", "model.args: DeepFM reads 'd', which is no feature; there are: x, c, k, b"),
        ("model.args.rows={c: 7}", "model.args: DeepFM does not read the feature 'k'"),
        ("model.args={rows: {'*': 7}, numbers: []}", "model.args: DeepFM does not read the feature 'x'"),
        ("model.args.rows={'*': many}", r"model.args: DeepFM refuses them: rows\['c'\]='many' is not allowed"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            rows_of(sets)


def test_a_model_needs_keys(log):
    with pytest.raises(InvalidArgument, match=r"model.args: DeepFM refuses them: rows=\{\} is not allowed"):
        train(job_of(log, "features={x: {kind: dense, log1p: true}}"))


def test_one_class_gives_no_auc(tmp_path):
    path = tmp_path / "ones.csv"
    path.write_text("1,2,k\n" * 10)
    assert math.isnan(train(job_of(path)).test_auc)
