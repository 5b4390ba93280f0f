"""A job over CSV with features on a running cluster: the program that it keeps has them, and serves columns."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data import ReadOptions
from sparserow.worker.data.sources import fit_features, open_reader
from sparserow_process import Launcher

ROWS = 2_000
JOB = """
name: texts
data:
  format: csv
  train: FOLDER/log.csv
  test: FOLDER/log.csv
  csv: {header: true, delimiter: ;, missing: ['?'], label: click, sample_weight: weight, group: user}
features:
  price: {kind: dense, log1p: true, scale: standardize}
  user: {kind: id}
  item: {kind: id, modulo: 1000, default: none}
  price_bucket: {kind: bucketize, column: price, quantiles: 16}
  user_country: {kind: cross, of: [user, country]}
  hour: {kind: time, column: at, zone: Europe/Berlin}
  country: {kind: id, vocabulary: FOLDER/countries.txt, unknown: {hash: 3}}
model: {class: DLRM, min_rows: 1, args: {rows: {'*': 100000}, dim: 8, bottom: [16], top: [16]}}
train: {epochs: 2, batch_size: 128, threads: 1}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    draw = np.random.default_rng(4)
    lines = ["click;price;user;item;country;at;weight"]
    for item in draw.integers(0, 40, ROWS).tolist():
        click = int(draw.random() < (0.85 if item % 2 else 0.15))
        price = "?" if draw.random() < 0.1 else f"{draw.exponential(20):.2f}"
        named = "" if draw.random() < 0.05 else f"i{item}"
        country = draw.choice(["DE", "FR", "US", ""])
        at = f"2024-05-{draw.integers(1, 29):02}T{draw.integers(24):02}:30:00"
        lines.append(f"{click};{price};u{draw.integers(300)};{named};{country};{at};{draw.integers(1, 4) / 2}")
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    (folder / "countries.txt").write_text("DE\nFR\n")
    path = folder / "job.yaml"
    path.write_text(JOB.replace("FOLDER", str(folder)))
    return path


def test_a_kept_program_has_its_features_and_serves_columns(job: Path, launcher: Launcher, tmp_path: Path) -> None:
    keep, result = tmp_path / "kept", tmp_path / "result.json"
    with sr.local_cluster(shards=1) as cluster:
        sets = ["--set", f"cluster.address={cluster.address}", "--set", f"publish.local={keep}"]
        run = launcher.start("train", str(job), *sets, "--json", str(result), keeps=True)
        assert run.popen.wait(300) == 0, run.err
        said = json.loads(result.read_text())
        assert said["test_auc"] > 0.75, "half of the items are clicked most of the time"
        words = shlex.split(said["commands"]["publish"])[1:]
        published = launcher.start(*words)
        assert published.end() == 0, published.err
    config = load_config(JobConfig, job)
    fitted = fit_features(config.data)
    (batch,) = open_reader(config.data, "train", fitted, ReadOptions(batch_size=ROWS, in_order=False))
    log = job.parent / "log.csv"
    rows = [line.split(";") for line in log.read_text().splitlines()]
    texts = {name: [None if row[at] in ("", "?") else row[at] for row in rows[1:]] for at, name in enumerate(rows[0])}
    columns = pa.table({**texts, "price": [None if cell is None else float(cell) for cell in texts["price"]]})
    with (
        sr.local_serving("texts", root=str(keep)) as serving,
        sr.ServingClient(serving.addresses, model="texts") as client,
        sr.ServedModel(client, str(keep)) as served,
    ):
        assert served.features is not None
        assert set(served.columns) == {"price", "user", "item", "country", "at"}
        arrays = served.features(columns)
        for at, name in enumerate(fitted.spec.sparse_names):
            np.testing.assert_array_equal(arrays[name], batch.sparse[:, at].numpy(), err_msg=name)
        np.testing.assert_array_equal(arrays["price"], batch.dense[:, 0].numpy())
        scores = served(columns)
        np.testing.assert_allclose(scores, served(*batch.tensors.values()), rtol=1e-5, atol=1e-6)
        for name in ("user", "item"):  # whose rows are at the key modulo the rows of the table
            value = next(cell for cell in texts[name] if cell is not None)
            table = f"embeddings.tables.{name}"
            query = launcher.start("query", table, f"--feature={name}={value}", f"--serving={serving.addresses[0]}")
            assert query.end() == 0, query.err
            assert query.out.startswith(f"{name}={value}: ")
            assert "(default row)" not in query.out
        predicted = launcher.start(
            "predict", "--model", "texts", "--input", str(log), "--root", str(keep), "--serving", serving.addresses[0],
            "--delimiter", ";", "--missing", "?",
        )  # fmt: skip
        assert predicted.end() == 0, predicted.err
        np.testing.assert_allclose([json.loads(line) for line in predicted.out.split()], scores, rtol=1e-4, atol=1e-4)
        bad = tmp_path / "bad.csv"
        bad.write_text("\n".join([*log.read_text().splitlines()[:3], "1;5;u1;i1;DE;noon;1"]) + "\n")
        refused = launcher.start(
            "predict", "--model", "texts", "--input", str(bad), "--root", str(keep), "--serving", serving.addresses[0],
            "--delimiter", ";", "--missing", "?", "--batch-rows", "2",
        )  # fmt: skip
        assert refused.end() == 1
        assert "bad.csv, row 3, column at: it is no timestamp: 'noon' (feature hour)" in refused.err
