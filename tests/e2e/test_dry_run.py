"""``sparserow train --dry-run``: every job file of the project, what it says, and that nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from sparserow.deploy.cli import main
from sparserow.proto.config.config import load_config
from sparserow.proto.config.job import JobConfig
from sparserow.proto.config.model_config import OwnModelConfig
from sparserow.worker.data import Batch, ReadOptions, write_click_log
from sparserow.worker.data.sources import fit_features, open_reader

JOBS = sorted((Path(__file__).resolve().parents[2] / "deploy" / "jobs").glob("*.yaml"))
ADULT = "39, Private, 77516, Bachelors, 13, Divorced, Sales, Unmarried, White, Male, 2174, 0, 40, Cuba, <=50K\n"


ZOO = ("wide_deep", "dcn", "autoint", "din", "mmoe", "sasrec", "two_tower")


def clicks() -> pa.Table:
    rows = {"click": [0, 1], "price": [1.5, 20.0], "age": [30, 40], "user": [1, 2], "item": ["a", "b"]}
    lists = {"history": [["a", "c"], ["b"]], "candidates": [["a", "b"], ["b", "c"]]}
    others = {"buy": [0, 1], "position": [0, 1], "country": ["DE", "US"]}
    return pa.table({**rows, **lists, **others, "at": pa.array([0, 3600], pa.timestamp("s"))})


def made_data(folder: Path, job: str) -> list[str]:
    """Small data in the form of a job, as ``--set`` options."""
    train, test = folder / "train", folder / "test"
    if job == "adult":
        for path in (train, test):
            path.write_text(ADULT * 20 + ADULT.replace("39", "51").replace("<=50K", ">50K"))
    elif job == "text":
        for path in (train, test):
            path.write_text("click,user,item,tags,price,at\n" + "yes,ada,i1,new|sale,12.5,2024-01-05T06:30:00Z\n" * 9)
    elif job in ("parquet", "features"):
        for path in (train, test):
            (path / "day=2024-01-03").mkdir(parents=True)
            pa.parquet.write_table(clicks(), path / "day=2024-01-03" / "part.parquet")
    elif job in ZOO:
        for path in (train, test):
            pa.parquet.write_table(clicks(), path)
    else:
        log = write_click_log(folder, rows=500, test_rows=100)
        train, test = Path(log.train), Path(log.test)
    return [f"--set=data.train={train}", f"--set=data.test={test}"]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    return int(ended.value.code or 0)


def check_named_tensors(config: JobConfig, batch: Batch, tensors: dict[str, Any]) -> None:
    """The tensors of a dry run are those of the reader: shapes, dtypes, and the first keys."""
    named = {name: values for name, values in batch.tensors.items() if isinstance(values, torch.Tensor)}
    for name, values in batch.tensors.items():
        if not isinstance(values, torch.Tensor):
            named |= {f"{name}.values": values[0], f"{name}.offsets": values[1]}
    columns = config.data.samples
    beside = [f"labels {name}" for name in columns.labels] or ["labels"]
    assert set(tensors) == {*named, *beside, *(["groups"] if columns.group else [])}
    for name, tensor in named.items():
        assert tensors[name]["shape"] == list(tensor.shape)
        assert tensors[name]["dtype"] == str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype == torch.int64:
            assert tensors[name]["example"] == ", ".join(str(value) for value in tensor[:2].tolist())


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_every_job_of_the_project_passes(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets, result = made_data(tmp_path, job.stem), tmp_path / "dry.json"
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert run(str(job), *sets, "--dry-run", f"--json={result}") == 0
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before, "a process was started"
    config = load_config(JobConfig, job, [each.removeprefix("--set=") for each in sets])
    told: dict[str, Any] = json.loads(result.read_text())
    shown = capsys.readouterr().out
    assert f"job {config.name}: 1 training and 1 test files; nothing is trained" in shown
    tensors = {each["name"]: each for each in told["tensors"]}
    tables = {each["name"]: each for each in told["tables"]}
    for name, table in tables.items():
        if isinstance(config.model, OwnModelConfig):
            part, feature = name.split(".tables.")  # the wide part of a model has tables of its own
            assert table["rows"] == config.model.args["wide" if part == "wide" else "rows"][feature]
        else:
            assert table["rows"] <= config.model.table_rows.get(name, config.model.rows)
        assert table["is_on_servers"] == (table["rows"] >= config.model.min_rows)
        assert table["bytes"] == table["rows"] * table["row_bytes"] > 0
        assert name in shown
    assert told["dense_parameters"] > 100
    assert told["pull_bytes"] > 0
    assert told["unique_keys"] >= len(tables) / 2
    features = fit_features(config.data)
    reader = open_reader(config.data, "train", features, ReadOptions(batch_size=config.train.batch_size))
    batch = next(iter(reader))
    samples = told["samples"]
    assert samples == len(batch)
    if isinstance(config.model, OwnModelConfig):
        check_named_tensors(config, batch, tensors)
        return
    for name, tensor in (("dense", batch.dense), ("sparse", batch.sparse), ("labels", batch.labels)):
        assert tensors[name]["shape"] == list(tensor.shape)
        assert tensors[name]["dtype"] == str(tensor.dtype).removeprefix("torch.")
    first = np.fromstring(tensors["sparse"]["example"], sep=",", dtype=np.int64)
    assert first.tolist() == batch.sparse[0, :2].tolist()
    names = [name.partition(" ")[2] for name in tensors if name.startswith("sparse[")]
    assert names == list(tables)


def test_a_mistake_is_named_before_anything_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = next(path for path in JOBS if path.stem == "parquet")
    sets = made_data(tmp_path, "parquet")
    assert run(str(job), *sets, "--dry-run", "--set=data.columns.label=clicked") == 1
    assert "clicked" in capsys.readouterr().err
    assert run(str(job), "--dry-run", f"--set=data.train={tmp_path}/absent", f"--set=data.test={tmp_path}") == 1
    assert "absent" in capsys.readouterr().err


def test_it_says_where_tables_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = next(path for path in JOBS if path.stem == "demo")
    sets, result = made_data(tmp_path, "demo"), tmp_path / "dry.json"
    sets += ["--set=tables={C1: {placement: device}, 'C*': {placement: auto}}", f"--json={result}"]
    assert run(str(job), *sets, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "devices of workers" in shown
    assert "servers or devices" in shown
    told = json.loads(result.read_text())["tables"]
    assert {each["name"]: (each["placement"], each["is_on_servers"]) for each in told} == {
        each["name"]: ("device", False) if each["name"] == "C1" else ("auto", True) for each in told
    }
    assert run(str(job), *sets, "--dry-run", "--set=train.staleness=1") == 1
    assert "tables.C1.placement: 'device' is not allowed" in capsys.readouterr().err
