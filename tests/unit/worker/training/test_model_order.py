"""The order of a model's inputs and tasks: what is noted of a job, and which checkpoint is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data.sources import fit_features
from sparserow.worker.data.synthetic import write_click_log
from sparserow.worker.training.model_order import KEY, check_order, order_of


def order(folder: Path, *sets: str) -> dict[str, list[str]]:
    settings = ["name=ctr", f"data.train={folder}/train.tsv", f"data.test={folder}/test.tsv", *sets]
    job = load_config(JobConfig, None, settings)
    return order_of(job, fit_features(job.data).spec)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    write_click_log(folder, rows=50, test_rows=20)
    return folder


def test_the_order_of_a_job(log: Path) -> None:
    kind = order(log, "model={class: DLRM, args: {rows: {'*': 100}}, min_rows: 1}")
    assert kind["inputs"][:2] == ["I1", "I2"]
    assert kind["inputs"][13:15] == ["C1", "C2"]
    assert kind["tasks"] == ["label"]
    rows = "rows: {C2: 9, C1: 9}"
    own = order(log, f"model={{class: DLRM, args: {{numbers: [I2, I1], {rows}, dim: 4, bottom: [4], top: [4]}}}}")
    assert own["model.args.rows"] == ["C2", "C1"]
    assert own["model.args.numbers"] == ["I2", "I1"]
    assert "model.args.top" not in own


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({}, "does not say in which order"),
        ({KEY: {"inputs": ["a", "b"]}}, r"tasks in the order \[\], and this job \[x, y\]"),
        ({KEY: {"inputs": ["b", "a"], "tasks": ["x", "y"]}}, r"inputs in the order \[b, a\], and this job \[a, b\]"),
        ({KEY: {"inputs": ["a", "b"], "tasks": ["y", "x"]}}, r"tasks in the order \[y, x\], and this job \[x, y\]"),
    ],
)
def test_another_order_is_refused(saved: dict, told: str) -> None:
    with pytest.raises(sr.errors.FailedPrecondition, match=told):
        check_order(saved, {"inputs": ["a", "b"], "tasks": ["x", "y"]}, "ckpt/save-000001")
    check_order({KEY: {"inputs": ["a", "b"], "tasks": ["x", "y"]}}, {"inputs": ["a", "b"], "tasks": ["x", "y"]}, "x")
