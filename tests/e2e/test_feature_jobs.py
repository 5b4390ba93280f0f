"""A job with features: it trains, its published model takes columns, and both compute the same inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data import ReadOptions
from sparserow.worker.data.sources import fit_features, open_reader
from sparserow_process import Launcher

SAMPLES = 10_000
FEATURES = """
  price: {kind: dense, log1p: true, scale: standardize}
  age: {kind: dense, scale: min_max, clip: [0, 80]}
  user: {kind: id}
  item: {kind: id, modulo: 1000}
  price_bucket: {kind: bucketize, column: price, quantiles: 16}
  age_bucket: {kind: bucketize, column: age, boundaries: [20, 40, 60]}
  user_country: {kind: cross, of: [user, country]}
  hour: {kind: time, column: at, zone: Europe/Berlin}
  country: {kind: id, vocabulary: VOCABULARY, unknown: {hash: 3}}
"""


def clicks(rows: int, seed: int) -> pa.Table:
    draw = np.random.default_rng(seed)
    items = draw.integers(0, 40, rows)
    some = draw.random(rows) < 0.1
    return pa.table(
        {
            "click": (draw.random(rows) < np.where(items % 2, 0.8, 0.2)).astype(np.int8),
            "price": pa.array(np.round(draw.exponential(20, rows), 2), mask=some),
            "age": pa.array(draw.integers(10, 100, rows), mask=np.roll(some, 1)),
            "user": pa.array(draw.integers(0, 300, rows), mask=np.roll(some, 2)),
            "item": pa.array([f"i{each}" for each in items]).dictionary_encode(),
            "country": np.array(["DE", "FR", "US", "XX"])[draw.integers(0, 4, rows)],
            "at": pa.array(draw.integers(0, 10**9, rows), pa.timestamp("s"), mask=np.roll(some, 3)),
        }
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    (folder / "countries.txt").write_text("DE\nFR\n")
    pa.parquet.write_table(clicks(3_000, 1), folder / "train.parquet", row_group_size=700)
    pa.parquet.write_table(clicks(SAMPLES, 2), folder / "test.parquet", row_group_size=3_000)
    path = folder / "job.yaml"
    path.write_text(
        f"name: clicks\ndata: {{format: parquet, train: {folder}/train.parquet, test: {folder}/test.parquet, "
        f"columns: {{label: click}}}}\nfeatures:{FEATURES.replace('VOCABULARY', str(folder / 'countries.txt'))}"
        "model: {class: DLRM, args: {rows: {'*': 100000}, dim: 8, bottom: [16], top: [16]}}\n"
        "train: {epochs: 3, batch_size: 128, staleness: 0, prefetch: 2}\n"
    )
    return path


@pytest.mark.full("test_text_jobs.py has fewer samples, of CSV")
def test_a_job_with_features_trains_and_its_model_takes_columns(job: Path, launcher: Launcher, tmp_path: Path) -> None:
    result, root = tmp_path / "result.json", str(tmp_path / "models")
    sets = ["--set", f"publish={{root: {root}}}", "--set", "train.workers=2"]
    run = launcher.start("train", str(job), *sets, "--json", str(result))
    assert run.popen.wait(300) == 0, run.err
    figures: dict[str, Any] = json.loads(result.read_text())
    assert figures["test_auc"] > 0.7, "half of the items are clicked four times as often"
    config = load_config(JobConfig, job)
    fitted = fit_features(config.data)
    reader = open_reader(config.data, "test", fitted, ReadOptions(batch_size=SAMPLES, in_order=False))
    batch = next(iter(reader))
    assert len(batch) == SAMPLES
    with (
        sr.local_serving("clicks", root=root) as serving,
        sr.ServingClient(serving.addresses) as client,
        sr.ServedModel(client, root) as served,
    ):
        assert set(served.columns) == {"price", "age", "user", "item", "country", "at"}
        assert served.features is not None
        arrays = served.features(clicks(SAMPLES, 2))
        for at, name in enumerate(fitted.spec.sparse_names):
            np.testing.assert_array_equal(arrays[name], batch.sparse[:, at].numpy(), err_msg=name)
        for at, feature in enumerate(fitted.spec.dense):
            np.testing.assert_allclose(
                arrays[feature.name], batch.dense[:, at].numpy(), rtol=1e-6, err_msg=feature.name
            )
        scores = served(clicks(SAMPLES, 2))
        torch.testing.assert_close(scores, served(*batch.tensors.values()), rtol=1e-5, atol=1e-6)
        one = {name: values[:1] for name, values in clicks(1, 2).drop_columns("click").to_pydict().items()}
        assert served(one).shape == (1,)


def test_few_keys_make_small_tables(job: Path, tmp_path: Path) -> None:
    from sparserow.deploy.train.dry_run import dry_run

    made = dry_run(load_config(JobConfig, job))
    rows = {table.name.removeprefix("embeddings.tables."): table.rows for table in made.tables}
    assert rows == {
        "user": 100_000,
        "item": 1000,
        "age_bucket": 5,
        "user_country": 100_000,
        "hour": 25,
        "country": 5,
        "price_bucket": 17,
    }
    assert [each.name for each in made.tensors if each.dtype == "float32"] == ["price", "age", "labels"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("features.item.modulo=500", r"the input 'sparse item' was .*1000.*; this reader has .*500"),
        ("features.age.clip=[0, 90]", "the input 'dense age' was "),
        ("features.zone={kind: id, column: country}", "the input 'sparse zone' was not there"),
        (None, None),
    ],
)
def test_a_position_with_other_features_is_refused(job: Path, change: str | None, message: str | None) -> None:
    """Else rows would go on with other keys than they were trained with."""

    def reader(sets: list[str]) -> Any:
        config = load_config(JobConfig, job, sets)
        return open_reader(config.data, "train", fit_features(config.data), ReadOptions(batch_size=64))

    before = reader([])
    next(iter(before))
    state = json.loads(json.dumps(before.state_dict()))
    after = reader([] if change is None else [change])
    if message is None:
        after.load_state_dict(state)
        return
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        after.load_state_dict(state)
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        after.load_state_dicts([state])


def test_a_row_that_a_feature_refuses_is_named_or_skipped(job: Path, tmp_path: Path) -> None:
    table = clicks(200, 5)
    prices = table.column("price").to_pylist()
    prices[17], prices[60] = float("inf"), -float("inf")
    path = tmp_path / "bad.parquet"
    pa.parquet.write_table(table.set_column(1, "price", pa.array(prices)), path, row_group_size=50)
    sets = [f"data.train={path}", f"data.test={path}"]
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"bad\.parquet, row 18, column price: it is inf, which is not finite"
    ):
        fit_features(load_config(JobConfig, job, sets).data)
    skips = load_config(JobConfig, job, [*sets, "data.on_bad_line=skip"])
    fitted = fit_features(skips.data)
    reader = open_reader(skips.data, "train", fitted, ReadOptions(batch_size=1000))
    assert sum(len(batch) for batch in reader) == 198
    assert (reader.bad_lines, reader.first_bad_line is None) == (2, False)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["features.click={kind: id}"], "features.click: reads 'click', which is data.columns.label"),
        (["features.user.modul=3"], r"features\.user: modul: unknown key; did you mean 'modulo'"),
        (["features={}"], "features: are needed with data.format parquet; allowed: a mapping of sections"),
        (["features.zip={kind: id}"], None),
    ],
)
def test_wrong_sections_are_named(job: Path, sets: list[str], message: str | None) -> None:
    if message is None:
        with pytest.raises(sr.errors.InvalidArgument, match=r"features\.zip: no column 'zip' in .*train\.parquet"):
            fit_features(load_config(JobConfig, job, sets).data)
        return
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        load_config(JobConfig, job, sets)
