"""The options of a job that are those of its session reach it."""

from __future__ import annotations

from typing import Any

import pytest

import sparserow as sr
from sparserow.deploy.train.training_run import run_worker
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import validate
from sparserow.worker.api import connect as connecting
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.training_report import Silence


class Seen(Exception):  # noqa: N818 - ends the call, and is no error
    pass


def test_they_are_given_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def connect(address: str, **options: Any) -> None:
        seen.update(options)
        raise Seen

    monkeypatch.setattr(connecting, "connect", connect)
    wanted = {
        "transport": "tcp",
        "wire_dtype": "bfloat16",
        "grad_scale": "sum",
        "namespace_policy": "new",
        "on_nonfinite": "skip",
    }
    data = {"format": "csv", "train": "a", "test": "b", "csv": {"label": 0}}
    tree = {
        "data": data,
        "features": {"c": {"kind": "id", "column": "column_1"}},
        "model": {"class": "DLRM", "args": {"rows": {"*": 1_000_000}}},
        "train": {**wanted, "staleness": 3},
        "cluster": {"address": "host:1"},
        "publish": {"local": None},
    }
    with pytest.raises(Seen):
        run_worker(validate(JobConfig, tree), WorkerGroup(), local_world=1, coordinator="host:1", observer=Silence())
    assert {name: seen[name] for name in wanted} == wanted
    assert seen["staleness"] == 3
    job = validate(JobConfig, {**tree, "train": {"dense": "ps", "quorum": 1}})
    with pytest.raises(Seen):
        run_worker(job, WorkerGroup(), local_world=1, coordinator="host:1", observer=Silence())
    assert seen["quorum"] == 1
    with pytest.raises(sr.errors.InvalidArgument, match=r"train\.namespace_policy: needs cluster\.address"):
        validate(JobConfig, {**tree, "cluster": {}})
