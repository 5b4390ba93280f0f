"""Files of 0 rows in each format: what reads them says so, and a file with rows beside them is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet
import pytest

import sparserow as sr
from column_uses import job_sets
from sparserow.deploy.preflight.health_checks import check_job
from sparserow.deploy.train.dry_run import dry_run
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.training.local_backend import LocalBackend
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence

FORMS = ["parquet", "orc", "arrow", "jsonl", "csv"]
NONE = r"no data lines, or no rows that data.where selects"


def write(path: Path, rows: int) -> None:
    numbers = list(range(rows))
    table = pa.table(
        {
            "y": pa.array([number % 2 for number in numbers], pa.int64()),
            "x": pa.array(numbers, pa.float64()),
            "c": pa.array([f"c{number}" for number in numbers], pa.string()),
        }
    )
    match path.suffix:
        case ".parquet":
            pa.parquet.write_table(table, path, row_group_size=10)
        case ".orc":
            pa.orc.write_table(table, str(path))
        case ".arrow":
            pa.feather.write_feather(table, path)
        case ".csv":
            path.write_text("y,x,c\n" + "".join(f"{row['y']},{row['x']},{row['c']}\n" for row in table.to_pylist()))
        case _:
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def job_of(train: Path, test: Path, *sets: str) -> JobConfig:
    form = train.suffix[1:]
    roles = "label: y, numeric: {x: none}, categorical: [c]"
    columns = f"csv={{header: true, {roles}}}" if form == "csv" else f"columns={{{roles}}}"
    places = [f"data.train={train}", f"data.test={test}", f"data.format={form}", f"data.{columns}"]
    model = "model={class: DLRM, args: {rows: {'*': 100}}, min_rows: 1}"
    return load_config(JobConfig, None, job_sets("name=j", *places, model, *sets))


def train(job: JobConfig) -> Any:
    return Trainer(job, group=WorkerGroup(), backend=LocalBackend(job.train), observer=Silence()).run()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("train_rows", "test_rows"), [(0, 0), (0, 50), (50, 0)])
def test_files_of_no_rows_are_named(tmp_path: Path, form: str, train_rows: int, test_rows: int) -> None:
    one, other = tmp_path / f"one.{form}", tmp_path / f"other.{form}"
    write(one, train_rows)
    write(other, test_rows)
    job = job_of(one, other)
    empty = other if train_rows else one
    words = rf"{empty.name}: ({NONE}|the file is empty; expected a JSON object on each line)"
    for call in (dry_run, train):
        with pytest.raises(sr.errors.InvalidArgument, match=words):
            call(job)
    (tmp_path / "job.yaml").write_text(json.dumps(job.model_dump(mode="json", exclude_unset=True)))
    wrong = [finding for finding in check_job(tmp_path / "job.yaml") if finding.level == "wrong"]
    assert [any(path.name in finding.text for path in (one, other)) for finding in wrong] == [True]


@pytest.mark.parametrize("form", ["parquet", "orc", "arrow", "csv"])
def test_a_job_begins_with_the_first_file_that_has_rows(tmp_path: Path, form: str) -> None:
    for number, rows in enumerate((0, 0, 30)):
        write(tmp_path / f"part-{number}.{form}", rows)
    path = tmp_path / f"part-*.{form}"
    made = dry_run(job_of(path, path))
    assert (made.samples, made.train_files) == (10 if form == "parquet" else 30, 3)
    assert train(job_of(path, path)).epochs


def test_a_job_begins_with_the_first_rows_that_it_selects(tmp_path: Path) -> None:
    write(tmp_path / "log.parquet", 30)
    made = dry_run(job_of(tmp_path / "log.parquet", tmp_path / "log.parquet", "data.where=x >= 25"))
    assert made.samples == 5
    with pytest.raises(sr.errors.InvalidArgument, match=NONE):
        dry_run(job_of(tmp_path / "log.parquet", tmp_path / "log.parquet", "data.where=x >= 30"))
