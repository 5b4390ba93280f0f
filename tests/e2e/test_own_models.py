"""A job file with a class of one's own: lists, tied and frozen tables, several tasks; trained, published, refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import sparserow as sr
from doc_blocks import doc_blocks
from own_models import Shop
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data import Batch, ReadOptions
from sparserow.worker.data.sources import feature_spec, fit_features, open_reader
from sparserow.worker.metrics.binary import auc
from sparserow.worker.metrics.grouped import GroupedScores
from sparserow.worker.metrics.task_metrics import BinaryMetrics
from sparserow.worker.training.build_model import build_model, check_data
from sparserow.worker.training.job_tables import JobTables
from sparserow.worker.training.local_backend import LocalBackend
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.ps_backend import PsBackend
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence
from sparserow_process import Launcher

ITEMS, BRANDS, DIM, BATCH, STEPS, WORKERS = 200, 30, 8, 32, 100, 2
SALE = 0.5  # the weight of the second task
JOB = """
name: shop
data:
  format: parquet
  train: FOLDER/train.parquet
  test: FOLDER/test.parquet
  columns:
    labels: {click: {}, sold: {column: sale, values: {"no": 0, "yes": 1}}}
    sample_weight: weight
    group: user
features:
  age: {kind: dense, scale: standardize}
  item: {kind: id, modulo: 200, table: items}
  history: {kind: sequence, modulo: 200, max_len: 20, table: items}
  brand: {kind: id, modulo: 30}
model:
  class: own_models:Shop
  args: {items: 200, brands: 30, record: FOLDER/record}
  min_rows: 10
  tables: {items: [item, seen]}
tasks:
  click: {}
  sale: {label: sold, weight: 0.5}
tables:
  brand: {frozen: true, weights: FOLDER/brands.parquet}
train:
  workers: 2
  batch_size: 16
  accumulate: 2
  staleness: 0
  prefetch: 2
  dense_optimizer: {kind: adam, lr: 0.01}
  row_optimizer: {kind: adagrad, lr: 0.1}
"""


def sales(rows: int, seed: int) -> pa.Table:
    draw = np.random.default_rng(seed)
    items = draw.integers(0, ITEMS, rows)
    lengths = draw.integers(0, 7, rows)
    histories = [draw.integers(0, ITEMS, length).tolist() for length in lengths]
    # An item is clicked where the history has one of its kind.
    likes = np.array([any(each % 5 == item % 5 for each in seen) for item, seen in zip(items, histories, strict=True)])
    clicks = draw.random(rows) < np.where(likes, 0.9, 0.1)
    return pa.table(
        {
            "click": clicks.astype(np.int8),
            "sale": np.where(clicks & (draw.random(rows) < 0.5), "yes", "no"),
            "weight": draw.integers(1, 3, rows).astype(np.float32),
            "user": draw.integers(0, 40, rows),
            "age": draw.integers(10, 80, rows),
            "item": items,
            "history": pa.array(histories, pa.list_(pa.int64())),
            "brand": draw.integers(0, BRANDS, rows),
        }
    )


def brand_vectors() -> np.ndarray:
    return np.random.default_rng(9).normal(size=(BRANDS, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    (folder / "record").mkdir()
    pa.parquet.write_table(sales(BATCH * WORKERS * STEPS, 1), folder / "train.parquet", row_group_size=1000)
    pa.parquet.write_table(sales(1500, 2), folder / "test.parquet", row_group_size=400)
    vectors = pa.FixedSizeListArray.from_arrays(brand_vectors().ravel(), DIM)
    pa.parquet.write_table(pa.table({"key": np.arange(BRANDS), "vector": vectors}), folder / "brands.parquet")
    (folder / "job.yaml").write_text(JOB.replace("FOLDER", str(folder)))
    return folder


@pytest.fixture
def launcher(launcher: Launcher) -> Launcher:
    """A launcher whose processes find the model's module, as in the folder of its user."""
    return launcher.with_support_modules()


def first_model(config: JobConfig) -> Shop:
    """The model before its first step, in plain torch: rows begin as the servers begin them, by seed and key."""
    torch.manual_seed(config.train.seed)
    with sr.deferred(min_rows=10):
        model = Shop(ITEMS, BRANDS)
    with sr.deferred(min_rows=10):
        other = Shop(ITEMS, BRANDS)
    with sr.InProcessCluster(shards=2).connect("shop") as session:
        session.distribute(other, optimizer=sr.optim.SGD(lr=1.0), bind={"items": ["item", "seen"]}, min_rows=10)
        rows = torch.from_numpy(session.table("items").pull(np.arange(ITEMS)))
    model.item = torch.nn.Embedding.from_pretrained(rows.clone(), freeze=False)
    model.seen = torch.nn.Embedding(ITEMS, DIM)
    model.seen.weight = model.item.weight
    model.brand = torch.nn.Embedding.from_pretrained(torch.from_numpy(brand_vectors()))
    return model


def loss_of(model: Shop, batch: Batch) -> torch.Tensor:
    tensors = batch.tensors
    out = model(**{name: tensors[name] for name in ("age", "item", "history", "brand")})
    clicks = bce(out["click"], batch.label("click"), weight=batch.weights)
    return clicks + SALE * bce(out["sale"], batch.label("sold"), weight=batch.weights)


def local_logits(config: JobConfig) -> tuple[list[list[torch.Tensor]], set[int]]:
    """The logits of clicks of each rank and step, of the same model trained in plain torch, and the items."""
    fitted = fit_features(config.data)
    readers = [
        open_reader(
            config.data,
            "train",
            fitted,
            ReadOptions(BATCH, rank, WORKERS, shuffle=True, shuffle_rows=config.data.shuffle_rows, seed=0),
        )
        for rank in range(WORKERS)
    ]
    model = first_model(config)
    rows = torch.optim.Adagrad([model.item.weight], lr=0.1, eps=1e-10)
    dense = torch.optim.Adam([*model.score.parameters(), *model.click.parameters(), *model.sale.parameters()], lr=0.01)
    items: set[int] = set()
    for batches in zip(*readers, strict=True):
        for batch in batches:
            items.update(batch.tensors["item"].tolist(), batch.tensors["history"][0].tolist())
        losses = [loss_of(model, batch) for batch in batches]
        (sum(losses) / WORKERS).backward()
        for optimizer in (rows, dense):
            optimizer.step()
            optimizer.zero_grad()
    return [model.logits[rank::WORKERS] for rank in range(WORKERS)], items


def check_what_was_written(folder: Path, logits: list[list[torch.Tensor]], config: JobConfig) -> None:
    """The lines of the run: windows of both workers' samples, each predicted before it was trained on."""
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    windows = [line for line in lines if line["kind"] == "window"]
    assert [line["samples"] for line in windows] == [3008, 6016, BATCH * WORKERS * STEPS], "47 steps of 64 samples"
    assert (lines[0]["kind"], lines[-1]["kind"]) == ("run", "epoch")
    assert len(list((folder / "board").iterdir())) == 1
    with_labels = BinaryMetrics()
    fitted = fit_features(config.data)
    for rank in range(WORKERS):
        options = ReadOptions(BATCH, rank, WORKERS, shuffle=True, shuffle_rows=config.data.shuffle_rows, seed=0)
        batches = open_reader(config.data, "train", fitted, options)
        made = torch.cat(logits[rank]).view(-1, BATCH)
        for step, batch in enumerate(batches):
            if step < 47:
                with_labels.add(made[step].numpy(), batch.label("click").numpy())
    assert windows[0]["metrics"]["log_loss"] == pytest.approx(with_labels.results()["log_loss"], abs=1e-5)


def test_it_trains_as_in_plain_torch_and_is_served(folder: Path, launcher: Launcher, tmp_path: Path) -> None:
    result, root = tmp_path / "result.json", str(tmp_path / "models")
    job = str(folder / "job.yaml")
    places = f"file: {tmp_path}/run.jsonl, tensorboard: {tmp_path}/board"
    written = ["--set", f"metrics={{{places}, progressive: {{window: 3000}}}}"]
    run = launcher.start("train", job, *written, "--set", f"publish={{root: {root}}}", "--json", str(result))
    assert run.popen.wait(300) == 0, run.err
    config = load_config(JobConfig, job)
    wanted, items = local_logits(config)
    found = [torch.from_numpy(np.fromfile(path, np.float32)).view(-1, BATCH) for path in (folder / "record").iterdir()]
    assert [len(each) for each in found] == [STEPS] * WORKERS
    if not torch.allclose(found[0][0], wanted[0][0], atol=1e-4):
        found.reverse()  # the files are named by process
    for rank in range(WORKERS):
        for step in range(STEPS):
            torch.testing.assert_close(found[rank][step], wanted[rank][step], atol=1e-5, rtol=0, msg=f"{rank} {step}")
    check_what_was_written(tmp_path, wanted, config)
    figures: dict[str, Any] = json.loads(result.read_text())
    metrics = figures["history"][-1]["metrics"]
    assert metrics["click.auc"] == figures["test_auc"] > 0.6
    assert metrics["sale.auc"] > 0.5
    names = ("auc", "log_loss", "normalized_entropy", "calibration", "gauc")
    assert {name for name in metrics if "[" not in name} == {
        f"{task}.{name}" for task in ("click", "sale") for name in names
    }
    assert figures["rows"] == len(items) + BRANDS, "tied layers have one table"
    test = pa.parquet.read_table(folder / "test.parquet")
    with (
        sr.local_serving("shop", root=root) as serving,
        sr.ServingClient(serving.addresses) as client,
        sr.ServedModel(client, root) as served,
    ):
        assert set(served.columns) == {"age", "item", "history", "brand"}, "neither labels nor weights"
        out = served.predict(test).output
        one = served.predict(test.slice(7, 1)).output
    labels = test["click"].to_numpy()
    assert auc(out["click"].numpy(), labels) == pytest.approx(figures["test_auc"], abs=1e-6)
    groups = GroupedScores()
    groups.add(test["user"].to_numpy(), out["click"].numpy(), labels)
    assert groups.sums().gauc == pytest.approx(metrics["click.gauc"], abs=1e-6)
    assert "test click.auc" in run.out
    torch.testing.assert_close(one["sale"], out["sale"][7:8], atol=1e-5, rtol=0)


def test_a_frozen_table_without_rows_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    sets = ["train.workers=1", "train.prefetch=0", "model.args.record=''"]
    with sr.local_cluster(shards=1) as cluster:
        for more, is_told in (("tables.brand.weights=null", True), ("train.epochs=1", False)):
            job = load_config(JobConfig, folder / "job.yaml", [*sets, more])
            caplog.clear()
            with sr.connect(cluster.address, f"{is_told}") as session:
                backend = PsBackend(job, session, cluster.address)
                Trainer(job, group=WorkerGroup(), backend=backend, observer=Silence()).run()
            words = "table brand is frozen, and the namespace has no rows of it: every key reads its initial row; give"
            assert (words in caplog.text) == is_told


def test_a_local_backend_trains_the_same_class(folder: Path) -> None:
    sets = ["model.backend=local", "train.prefetch=0", "train.workers=1", "tables={}", "model.args.record=''"]
    job = load_config(JobConfig, folder / "job.yaml", sets)
    backend = LocalBackend(job.train, job.model.min_rows)
    result = Trainer(job, group=WorkerGroup(), backend=backend, observer=Silence()).run()
    assert result.test_auc > 0.6
    assert result.rows == ITEMS + BRANDS


def test_weighted_metrics_are_those_of_the_samples_and_their_weights(folder: Path) -> None:
    sets = ["model.backend=local", "train.prefetch=0", "train.workers=1", "tables={}", "model.args.record=''"]
    found = {}
    for weighted in (False, True):
        job = load_config(JobConfig, folder / "job.yaml", [*sets, f"metrics.weighted={weighted}"])
        backend = LocalBackend(job.train, job.model.min_rows)
        trainer = Trainer(job, group=WorkerGroup(), backend=backend, observer=Silence())
        found[weighted] = trainer.run().history[-1].metrics
    reader = open_reader(job.data, "test", fit_features(job.data), ReadOptions(8192, in_order=False))
    batch = next(iter(reader))
    assert batch.weights is not None
    with torch.no_grad():
        logits = trainer.model.eval()(**batch.tensors)["click"].numpy()
    twice = np.repeat(np.arange(len(batch)), batch.weights.numpy().astype(np.int64))  # weights are 1 and 2
    labels = batch.label("click").numpy()
    assert found[True]["click.auc"] == pytest.approx(auc(logits[twice], labels[twice]), abs=1e-9)
    groups = GroupedScores()
    groups.add(batch.groups.numpy()[twice], logits[twice], labels[twice])
    assert found[True]["click.gauc"] == pytest.approx(groups.sums().gauc, abs=1e-9)
    assert found[False]["click.auc"] == pytest.approx(auc(logits, labels), abs=1e-9)
    assert found[True]["click.auc"] != found[False]["click.auc"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model.class=own_modls:Shop"], "model.class: module own_modls cannot be imported: ModuleNotFoundError"),
        (["model.class=own_models:Shp"], "model.class: own_models has no class Shp of nn.Module; nearest: Shop"),
        (["model.class=Dlmr"], "model.class: sparserow has no model Dlmr; .*a class of one's own is MODULE:CLASS"),
        (["model.args.itms=3"], "model.args.itms: own_models:Shop has no such argument; nearest: items"),
        (["model.args={items: 200}"], "model.args.brands: is missing, and own_models:Shop has no default for it"),
        (["features.brnd={kind: id, column: brand}", "features.brand.column=age"], "does not take the feature 'brnd'"),
        (["features={item: {kind: id}, age: {kind: dense}}"], "takes 'history', which is no feature"),
        (["tasks.sale={label: sold, loss: in_batch_softmax, item: age}"], "tasks.sale.item: 'age' is not allowed"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_worker_starts(folder: Path, sets: list[str], message: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        check_data(load_config(JobConfig, folder / "job.yaml", sets))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["data.columns.labels.click={values: {a: 0}, dtype: int64}"], "values: is not possible beside dtype"),
        (["data.columns.label=click"], "label: exactly one of label and labels is needed"),
        (["data.columns.sample_weight=click"], "column click has two roles"),
        (["features.weight={kind: dense}"], "features.weight: reads 'weight', which is data.columns.sample_weight"),
        (["tasks={click: {}}"], "data.columns.labels.sold: has no effect, as no task has this label"),
        (["tasks.sale.label=sole"], "tasks.sale.label: there is no label 'sole'; allowed: click, sold"),
        (
            ["tasks={a.b: {label: click}, sale: {label: sold}}"],
            "tasks: 'a.b' is not allowed; allowed: names of letters",
        ),
        (["metrics.progressive={}"], "metrics.progressive: needs metrics.file"),
        (["metrics.stop={metric: click.calibration}"], "metrics.stop.metric: 'click.calibration' is not allowed"),
        (["metrics.at=[5]"], "metrics.at: needs a task over candidates"),
        (["metrics.max_groups=5", "data.columns.group=null"], "metrics.max_groups: needs a group of data"),
        (["tasks.sale.item=item"], "tasks.sale.item: has no effect with loss bce"),
        (["tasks={}"], "tasks: are needed, as data.columns.labels has several"),
        (["tables.brand={weights: a.parquet}"], "tables.brand: weights: has no effect without frozen"),
        (["tables.brand.optimizer={kind: sgd}"], "tables.brand: optimizer: has no effect with frozen"),
        (["tables.brand.max_rows=5"], "tables.brand: frozen: excludes options of admission"),
        (["train.dense=ps", "train.staleness=2"], "tables.brand.weights: needs train.dense ddp"),
    ],
)
def test_sections_that_do_not_fit_together_are_named(folder: Path, sets: list[str], message: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        load_config(JobConfig, folder / "job.yaml", sets)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model.tables={items: [item, sen]}"], "model.tables.items: the model has no embedding layer 'sen'; nearest"),
        (["features.item.table=itms"], "features.item.table: there is no table 'itms'; nearest: items"),
        (["features.item.modulo=300"], "features.item.table: table 'items' has 200 rows, but .* can give 300 keys"),
        (["model.min_rows=1000"], "model.tables.items: layer 'item' has 200 rows, fewer than model.min_rows"),
        (["model.min_rows=1000", "model.tables={}"], "model.min_rows: 1000 leaves no embedding layer to the servers"),
        (["model.args.dim=-1"], "model.args: own_models:Shop refuses them"),
    ],
)
def test_tables_that_do_not_fit_are_refused_before_training(folder: Path, sets: list[str], message: str) -> None:
    job = load_config(JobConfig, folder / "job.yaml", sets)
    spec = feature_spec(job.data)
    with pytest.raises(sr.errors.InvalidArgument, match=message), sr.deferred(min_rows=job.model.min_rows):
        JobTables(job, build_model(job.model, spec))


@pytest.mark.parametrize("metric", ["click.auc", "click.log_loss"])
def test_a_run_stops_when_its_metric_gets_no_better(folder: Path, metric: str) -> None:
    sets = ["model.backend=local", "train.prefetch=0", "train.workers=1", "tables={}", "model.args.record=''"]
    stop = f"metrics.stop={{metric: {metric}, after: 2, least_gain: 0.05}}"
    job = load_config(JobConfig, folder / "job.yaml", [*sets, "train.epochs=9", stop])
    backend = LocalBackend(job.train, job.model.min_rows)
    result = Trainer(job, group=WorkerGroup(), backend=backend, observer=Silence()).run()
    values = [epoch.metrics[metric] * (-1 if metric == "click.log_loss" else 1) for epoch in result.history]
    assert result.epochs == len(values) < 9
    best = values.index(max(values[:-2]))
    assert all(value <= values[0] + 0.05 or best > 0 for value in values[-2:])


def test_too_many_groups_end_an_evaluation(folder: Path) -> None:
    sets = ["model.backend=local", "train.prefetch=0", "train.workers=1", "tables={}", "model.args.record=''"]
    job = load_config(JobConfig, folder / "job.yaml", [*sets, "metrics.max_groups=39"])
    backend = LocalBackend(job.train, job.model.min_rows)
    trainer = Trainer(job, group=WorkerGroup(), backend=backend, observer=Silence())
    with pytest.raises(sr.errors.InvalidArgument, match=r"metrics\.max_groups: 40 groups of samples are on one"):
        trainer.run()


def test_frozen_rows_that_are_not_there_end_the_job(folder: Path, launcher: Launcher) -> None:
    sets = ["--set", f"tables.brand.weights={folder}/none.parquet", "--set", "train.workers=1"]
    run = launcher.start("train", str(folder / "job.yaml"), *sets)
    assert run.popen.wait(300) != 0
    assert "none.parquet" in run.err


def test_a_dry_run_names_each_tensor_and_table(folder: Path, launcher: Launcher, tmp_path: Path) -> None:
    result = tmp_path / "dry.json"
    run = launcher.start("train", str(folder / "job.yaml"), "--dry-run", "--json", str(result))
    assert run.popen.wait(120) == 0, run.err
    made = json.loads(result.read_text())
    shapes = {tensor["name"]: tuple(tensor["shape"]) for tensor in made["tensors"]}
    rows = (BATCH // 2,)
    assert shapes["age"] == shapes["item"] == shapes["brand"] == rows
    assert shapes["history.offsets"] == (rows[0] + 1,)
    assert shapes["labels click"] == shapes["labels sold"] == shapes["sample weights"] == rows
    tables = {table["name"]: (table["rows"], table["dim"], table["placement"]) for table in made["tables"]}
    assert tables == {"items": (ITEMS, DIM, "servers"), "brand": (BRANDS, DIM, "servers")}


def test_the_job_of_the_page_passes_its_dry_run_in_its_own_folder(folder: Path, tmp_path: Path) -> None:
    blocks = {block.language: block.text for block in reversed(doc_blocks()) if block.page == "docs/own-models.md"}
    data = sales(500, 3).rename_columns(["click", "sold", "weight", "user", "age", "item", "history", "brand"])
    pa.parquet.write_table(data, tmp_path / "sales.parquet")
    (tmp_path / "shop.py").write_text(blocks["python"])
    text = re.sub(r"s3://bucket/sales/\w+", str(tmp_path / "sales.parquet"), blocks["yaml"])
    (tmp_path / "job.yaml").write_text(text)
    command = [sys.executable, "-m", "sparserow.deploy.cli", "train", "job.yaml", "--dry-run", "--json", "made.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    tables = {table["name"]: table["rows"] for table in json.loads((tmp_path / "made.json").read_text())["tables"]}
    assert tables == {"items": 1_000_000, "brand": 50_000}
