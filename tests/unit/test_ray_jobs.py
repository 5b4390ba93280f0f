"""What a job may name on Ray, before Ray is asked for anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparserow.deploy.ray.training import _check_paths
from sparserow.proto.config.config import load_config
from sparserow.proto.config.job import JobConfig
from sparserow.proto.errors import InvalidArgument

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "jobs" / "demo.yaml"
ABSOLUTE = ("data.train=/data/train.tsv", "data.test=/data/test.tsv")


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("data.train=logs/*.tsv", "data.train: 'logs/*.tsv'"),
        ("train.checkpoint={url: ckpt, every_steps: 5}", "train.checkpoint.url: 'ckpt'"),
        ("publish={root: models}", "publish.root: 'models'"),
    ],
)
def test_a_relative_path_is_refused_at_once(setting: str, path: str) -> None:
    job = load_config(JobConfig, str(DEMO), [*ABSOLUTE, setting])
    with pytest.raises(InvalidArgument, match="is not allowed on Ray, where each worker runs") as raised:
        _check_paths(job)
    assert path in str(raised.value)


def test_absolute_paths_and_urls_are_taken() -> None:
    _check_paths(load_config(JobConfig, DEMO, [*ABSOLUTE, "publish={root: s3://models}"]))
