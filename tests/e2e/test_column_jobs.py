"""Jobs of files with columns: by the command on a cluster, and the same bits as of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.feather as feather
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
import torch

from column_uses import job_sets
from long_form import FULL
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.training.local_backend import LocalBackend
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"
DAYS, ROWS = ("2024-01-01", "2024-01-02", "2024-01-03"), 3_000  # rows of a day
FORMATS = ("parquet", "orc", "arrow", "jsonl")


def clicks(day: int) -> pa.Table:
    """Clicks of a day; odd items are clicked often, and country XX is to be left out."""
    random = np.random.default_rng(day)
    items = random.integers(0, 40, ROWS)
    return pa.table(
        {
            "click": (random.random(ROWS) < np.where(items % 2, 0.8, 0.2)).astype(np.int8),
            "price": np.round(random.exponential(20, ROWS), 2),
            "age": pa.array([None if i % 11 == 0 else int(i) for i in random.integers(18, 80, ROWS)], pa.int16()),
            "user": [f"u{i}" for i in random.integers(0, 500, ROWS)],
            "item": items,
            "country": random.choice(["DE", "FR", "XX"], ROWS),
        }
    )


def write(table: pa.Table, path: Path, form: str) -> None:
    if form == "parquet":
        pq.write_table(table, path, row_group_size=700)
    elif form == "orc":
        orc.write_table(table, str(path))
    elif form == "arrow":
        feather.write_feather(table, path, chunksize=700)
    elif form == "csv":
        pa_csv.write_csv(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def write_days(folder: Path, form: str) -> Path:
    for number, day in enumerate(DAYS):
        (folder / f"day={day}").mkdir(parents=True)
        write(clicks(number), folder / f"day={day}" / f"part.{form}", form)
    return folder


@pytest.mark.parametrize("form", FORMATS if FULL else ["parquet"])
def test_the_shipped_job_trains_on_folders_by_day(launcher, tmp_path: Path, form: str) -> None:
    folder, result = write_days(tmp_path / "clicks", form), tmp_path / "result.json"
    sets = [
        f"data.train={folder}",
        f"data.test={folder}",
        f"data.format={form}",
        "model.args.rows={'*': 5000}",
        "model.min_rows=1",
        "model.args.dim=4",
    ]
    sets += ["train.batch_size=128", "train.workers=2", "train.threads=1", "train.row_optimizer.lr=0.2"]
    assigned = [part for setting in sets for part in ("--set", setting)]
    run = launcher.start("train", str(JOBS / "parquet.yaml"), *assigned, "--json", str(result))
    assert run.popen.wait(600) == 0, run.err
    figures = json.loads(result.read_text())
    kept = sum(sum(country != "XX" for country in clicks(day)["country"].to_pylist()) for day in (1, 2))
    assert (figures["history"][0]["samples"], figures["workers"], figures["shards"]) == (kept, 2, 2)
    assert 0.7 < figures["test_auc"] < 0.95


def trained(path: Path, form: str) -> dict[str, Any]:
    """The weights of a small model that was trained on plain torch, and its AUC."""
    roles = "label: click, numeric: {price: log, age: none}, categorical: [user, item, country], buckets: {price: 8}}"
    section = f"data.csv={{header: true, quote: '\"', {roles}" if form == "csv" else f"data.columns={{{roles}"
    sets = [f"data.train={path}", f"data.test={path}", f"data.format={form}", section, "data.shuffle_rows=0"]
    sets += [
        "model={class: DeepFM, backend: local, args: {rows: {'*': 512}, dim: 2, hidden: [4]}, min_rows: 1}",
        "train.batch_size=500",
    ]
    job = load_config(JobConfig, None, job_sets(*sets))
    trainer = Trainer(job, group=WorkerGroup(), backend=LocalBackend(job.train), observer=Silence())
    result = trainer.run()
    weights = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    return {"auc": torch.tensor(result.test_auc), "log loss": torch.tensor(result.test_log_loss), **weights}


def test_every_format_trains_the_model_of_text_bit_for_bit(tmp_path: Path) -> None:
    found = {}
    for form in ("csv", *FORMATS):
        path = tmp_path / f"clicks.{form}"
        write(clicks(0), path, form)
        found[form] = trained(path, form)
    for form in FORMATS:
        for name, weight in found["csv"].items():
            assert torch.equal(found[form][name], weight), (form, name)
