"""Tables with placement ``auto`` are planned with their own optimizers and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import sparserow as sr
from sparserow.deploy.preflight.planning import DEVICE_SHARE
from sparserow.deploy.train import placements
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import validate
from sparserow.worker.training.job_tables import JobTables
from sparserow.worker.training.process_group import WorkerGroup

ROWS, DIM = 1000, 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.ad = (nn.Embedding(ROWS, DIM) for _ in range(3))


def job_with(tables: dict[str, Any]) -> JobConfig:
    data = {"format": "parquet", "train": "a", "test": "b", "columns": {"label": "click"}}
    features = {name: {"kind": "id", "modulo": ROWS} for name in ("user", "item", "ad")}
    sections = {"data": data, "features": features, "model": {"class": "placed:Model", "min_rows": 1}}
    train = {"staleness": 0, "row_optimizer": {"kind": "sgd", "lr": 0.1}}
    return validate(JobConfig, {"name": "placed", **sections, "train": train, "tables": tables})


def test_a_tables_own_optimizer_and_dtype_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    room = ROWS * 4 * (2 * DIM + 1) + 100  # a row, one state of it, and its key
    monkeypatch.setattr(placements, "_memory_of", lambda *_: int(room / DEVICE_SHARE) + 1)
    auto = {"placement": "auto"}
    adam = {**auto, "optimizer": {"kind": "adam", "lr": 0.1}}
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"user": auto, "item": {}, "ad": {}}, {"user"}),
        ({"user": adam, "item": {}, "ad": {}}, set()),
        ({"user": {**auto, "dtype": "float16"}, "item": {}, "ad": {}}, set()),
        ({"user": adam, "item": auto, "ad": {}}, {"item"}),
    ]
    for tables, wanted in cases:
        job = job_with(tables)
        options = JobTables(job, Model()).options(placements.placements_of(job, WorkerGroup(), 1))
        found = {name for name, table in options.items() if table.placement == "device"}
        assert found == wanted, tables
    assert isinstance(options["item"], sr.Table)
