"""``timestamp`` of a job: the times of samples in every format, in batches, and in the windows that a run writes."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch

import sparserow as sr
from sparserow.deploy.train.run_log import RunLog
from sparserow.proto.config.data_config import DataConfig
from sparserow.proto.config.job import JobConfig
from sparserow.proto.features.cells import is_plain_text
from sparserow.proto.features.times import microseconds
from sparserow.proto.options.document import load_config
from sparserow.worker.data import BadLine, NamedBatch, ReadOptions
from sparserow.worker.data.sources import fit_features, open_reader
from sparserow.worker.training.local_backend import LocalBackend
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence

ROWS = 300
BEGIN = datetime.datetime(2024, 3, 1, tzinfo=datetime.UTC)
TIMES = [int((BEGIN + datetime.timedelta(minutes=7 * row)).timestamp() * 1e6) for row in range(ROWS)]


def text(row: int) -> str:
    """A third of the texts has no zone, a third ends in Z, and a third is of New Delhi."""
    moment = BEGIN + datetime.timedelta(minutes=7 * row)
    if row % 3 == 2:
        return moment.astimezone(datetime.timezone(datetime.timedelta(hours=5, minutes=30))).isoformat()
    return f"{moment:%Y-%m-%dT%H:%M:%S}" + ("Z" if row % 3 else "")


def write(path: Path, form: str, **changed: Any) -> None:
    """Writes clicks; ``changed`` is the time of some rows, as text, by ``row_N``."""
    texts = [changed.get(f"row_{row}", text(row)) for row in range(ROWS)]
    clicks, users = [row % 2 for row in range(ROWS)], [row % 7 for row in range(ROWS)]
    if form == "csv":
        lines = [f"{click},u{user},{when}" for click, user, when in zip(clicks, users, texts, strict=True)]
        path.write_text("click,user,when\n" + "\n".join(lines) + "\n")
        return
    if form == "jsonl":
        rows = zip(clicks, users, texts, strict=True)
        path.write_text(
            "".join(json.dumps(dict(zip(("click", "user", "when"), row, strict=True))) + "\n" for row in rows)
        )
        return
    kind = pa.timestamp("ns", "Asia/Tokyo") if form == "arrow" else pa.timestamp("ms")
    whens = pa.array([None if f"row_{row}" in changed else each * 1000 for row, each in enumerate(TIMES)], pa.int64())
    times = whens.cast(pa.timestamp("ns")).cast(pa.timestamp("ms")) if form == "parquet" else whens.cast(kind)
    table = pa.table({"click": clicks, "user": users, "when": times})
    if form == "parquet":
        pa.parquet.write_table(table, path, row_group_size=90)
    else:
        pa.feather.write_feather(table, path, chunksize=90)


def job_of(path: Path, form: str, *sets: str) -> JobConfig:
    section = f"{{label: click, timestamp: when{', header: true' if form == 'csv' else ''}}}"
    return load_config(
        JobConfig,
        None,
        [
            f"data={{format: {form}, train: '{path}', test: '{path}', shuffle_rows: 0}}",
            f"data.{'csv' if form == 'csv' else 'columns'}={section}",
            "features={user: {kind: id}, hour: {kind: time, column: when}}",
            "model={class: DeepFM, backend: local, args: {rows: {'*': 100}, dim: 4}, min_rows: 1}",
            "train={batch_size: 32, epochs: 2, row_optimizer: {kind: sgd}}",
            f"metrics={{progressive: {{window: 64}}, file: '{path}.run'}}",
            *sets,
        ],
    )


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "arrow"])
def test_times_are_microseconds_in_utc(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"log.{form}"
    write(path, form)
    job = job_of(path, form)
    batches = list(open_reader(job.data, "train", fit_features(job.data), ReadOptions(batch_size=128)))
    assert [time for batch in batches for time in batch.times.tolist()] == TIMES
    assert batches[0].time_range == (TIMES[0], TIMES[127])
    assert batches[0].part(5, 9).times.tolist() == TIMES[5:9]
    assert batches[0].part(5, 5).time_range is None
    named = NamedBatch.of(batches[0], ("user",), 50)
    assert [len(part.times) for part in named.micro_batches] == [50, 50, 28]
    assert named.to(torch.device("cpu")).time_range == (TIMES[0], TIMES[127])
    shuffled = open_reader(
        job.data, "train", fit_features(job.data), ReadOptions(batch_size=ROWS, shuffle=True, shuffle_rows=100, seed=3)
    )
    (whole,) = shuffled
    assert whole.times.tolist() != TIMES
    assert sorted(whole.times.tolist()) == TIMES


@pytest.mark.parametrize(
    ("form", "cell", "message"),
    [
        (
            "csv",
            "noon",
            "line 21, column when: 'noon' is not a time; expected a timestamp, a date, or a text of ISO 8601",
        ),
        ("csv", "", "line 21, column when: null is not a time"),
        ("jsonl", "2024-13-01", "row 20, column when: '2024-13-01' is not a time"),
        ("parquet", "", "row 20, column when: null is not a time"),
    ],
)
def test_a_sample_without_a_time_is_malformed(tmp_path: Path, form: str, cell: str, message: str) -> None:
    path = tmp_path / f"log.{form}"
    write(path, form, row_19=cell, row_200=cell)
    features = "features={user: {kind: id}}"
    job = job_of(path, form, features)
    reader = open_reader(job.data, "train", fit_features(job.data), ReadOptions(batch_size=64))
    with pytest.raises(BadLine, match=message):
        list(reader)
    job = job_of(path, form, features, "data.on_bad_line=skip")
    reader = open_reader(job.data, "train", fit_features(job.data), ReadOptions(batch_size=64))
    times = [time for batch in reader for time in batch.times.tolist()]
    assert times == [time for row, time in enumerate(TIMES) if row not in (19, 200)]
    assert reader.bad_lines == 2


def test_windows_of_a_run_say_from_when_to_when_they_are(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    write(path, "csv")
    job = job_of(path, "csv")
    with RunLog(job, Silence()) as log:
        Trainer(job, group=WorkerGroup(), backend=LocalBackend(job.train), observer=log).run()
    entries = [json.loads(line) for line in Path(f"{path}.run").read_text().splitlines()]
    windows = [entry for entry in entries if entry["kind"] == "window"]
    begins = list(range(0, ROWS, 64))
    assert [window["samples"] for window in windows] == [*([*begins[1:], ROWS]) * 2]
    told = [[np.datetime64(time.removesuffix("Z"), "us").astype(int) for time in window["times"]] for window in windows]
    assert told == [[TIMES[begin], TIMES[min(begin + 64, ROWS) - 1]] for begin in begins] * 2
    assert windows[0]["times"][0] == "2024-03-01T00:00:00.000000Z"


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["metrics.progressive=null"], r"data\.csv\.timestamp: needs data\.stream\.event_time, or "),
        (["data.csv.group=when"], r"column when has two roles; allowed: one of label, .* group and timestamp"),
        (["data.csv.timestamp=wen"], r"data\.csv\.timestamp: no column 'wen' in .*; allowed: click, user, when"),
    ],
)  # fmt: skip
def test_a_timestamp_without_an_effect_is_refused(tmp_path: Path, sets: list[str], message: str) -> None:
    write(tmp_path / "log.csv", "csv")
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        fit_features(job_of(tmp_path / "log.csv", "csv", *sets).data)


def test_a_column_of_another_type_is_no_time(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pa.parquet.write_table(pa.table({"click": [0, 1], "user": [1, 2], "when": [3.5, 4.5]}), path)
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"timestamp: column when of .* is double; expected a timestamp, a da"
    ):
        fit_features(job_of(path, "parquet", "features={user: {kind: id}}").data)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view()], ids=str
)
def test_texts_of_times_may_have_any_type_of_text(kind: pa.DataType) -> None:
    texts = pa.array([text(row) for row in range(9)])
    found, has_none = microseconds(texts.cast(kind))
    assert found.tolist() == TIMES[:9]
    assert not has_none.any()
    assert is_plain_text(kind)
    assert not is_plain_text(pa.list_(kind))


def test_a_column_of_lists_is_no_time(tmp_path: Path) -> None:
    path = tmp_path / "clicks.parquet"
    pa.parquet.write_table(pa.table({"click": [0, 1], "user": [1, 2], "when": [["a"], ["b"]]}), path)
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"timestamp: column when of .* is list<.*>; expected a timestamp"
    ):
        fit_features(job_of(path, "parquet", "features={user: {kind: id}}").data)


UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_integers_are_times_by_their_unit(tmp_path: Path, form: str, unit: str) -> None:
    path = tmp_path / f"log.{form}"
    whens = [time // 1_000_000 * UNITS[unit] for time in TIMES]
    clicks, users = [row % 2 for row in range(ROWS)], [row % 7 for row in range(ROWS)]
    if form == "parquet":
        pa.parquet.write_table(pa.table({"click": clicks, "user": users, "when": whens}), path)
    elif form == "csv":
        rows = zip(clicks, users, whens, strict=True)
        path.write_text("click,user,when\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    else:
        rows = zip(clicks, users, whens, strict=True)
        path.write_text(
            "".join(json.dumps(dict(zip(("click", "user", "when"), row, strict=True))) + "\n" for row in rows)
        )
    section = "csv" if form == "csv" else "columns"
    sets = [f"data.{section}.timestamp_unit={unit}", f"features.hour.unit={unit}"]
    job = job_of(path, form, *sets)
    batches = list(open_reader(job.data, "train", fit_features(job.data), ReadOptions(batch_size=128)))
    assert [time for batch in batches for time in batch.times.tolist()] == TIMES
    hours = [datetime.datetime.fromtimestamp(time / 1e6, datetime.UTC).hour for time in TIMES]
    assert [hour for batch in batches for hour in batch.tensors["hour"].tolist()] == hours


def test_dates_are_times(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    days = [datetime.date(2024, 2, 27) + datetime.timedelta(days=row) for row in range(ROWS)]
    for kind in (pa.date32(), pa.date64()):
        table = pa.table({"click": [0, 1] * (ROWS // 2), "user": range(ROWS), "when": pa.array(days, kind)})
        pa.parquet.write_table(table, path)
        job = job_of(path, "parquet", "features.hour={kind: time, column: when, part: day}")
        (batch,) = open_reader(job.data, "train", fit_features(job.data), ReadOptions(batch_size=ROWS))
        midnight = datetime.time(tzinfo=datetime.UTC)
        assert batch.times.tolist() == [int(datetime.datetime.combine(day, midnight).timestamp() * 1e6) for day in days]
        assert batch.tensors["hour"].tolist() == [day.day - 1 for day in days]


@pytest.mark.parametrize(
    ("sets", "cells", "message"),
    [
        ((), [1, 2], r"data.columns.timestamp: column when of .* is int64; expected a timestamp, a date, or a text"),
        (
            ("data.columns.timestamp_unit=s",),
            [1, 10**15],
            r"column when: '1000000000000000' is not a time; expected .* unit",
        ),
        (
            ("data.columns.timestamp_unit=ms",),
            [1.5, 2.5],
            r"column when of .* is double; expected .* of the given unit",
        ),
    ],
)
def test_integers_without_a_unit_and_beyond_it_are_refused(
    tmp_path: Path, sets: tuple[str, ...], cells: list[int], message: str
) -> None:
    path = tmp_path / "log.parquet"
    pa.parquet.write_table(pa.table({"click": [0, 1], "user": [1, 2], "when": cells}), path)
    job = job_of(path, "parquet", "features={user: {kind: id}}", *sets)
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        list(open_reader(job.data, "train", fit_features(job.data), ReadOptions(batch_size=ROWS)))


def test_a_column_of_texts_may_have_integers_and_times_of_iso_8601() -> None:
    texts = pa.array(["1704067200", "2024-01-01", None, "2024-01-01T01:00:00+01:00"])
    found, has_none = microseconds(texts, "s")
    assert has_none.tolist() == [False, False, True, False]
    assert set(found[~has_none].tolist()) == {1_704_067_200_000_000}
    assert sr.features.Features([sr.features.TimeFeature("at", unit="s")])({"at": texts})["at"].tolist() == [
        0,
        0,
        24,
        0,
    ]


def test_a_feature_of_integers_needs_a_unit() -> None:
    columns = {"when": [1_700_000_000, 3600]}
    assert sr.features.Features([sr.features.TimeFeature("when", unit="s")])(columns)["when"].tolist() == [22, 1]
    with pytest.raises(sr.errors.InvalidArgument, match=r"has type int64; a timestamp.* or a unit: of integers"):
        sr.features.Features([sr.features.TimeFeature("when")])(columns)
    with pytest.raises(sr.errors.InvalidArgument, match=r"timestamp_unit: has no effect without timestamp"):
        load_config(DataConfig, None, ["format=csv", "train=a", "test=a", "csv={label: a, timestamp_unit: s}"])
