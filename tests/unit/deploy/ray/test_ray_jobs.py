"""What a job may name on Ray, before Ray is asked for anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from sparserow.deploy.ray.training import _check_paths
from sparserow.proto.config.job import JobConfig
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.features.kinds import KINDS
from sparserow.proto.options.document import load_config
from sparserow.proto.options.path_text import PathText
from stream_job import write_stream_job

DEMO = Path(__file__).resolve().parents[4] / "deploy" / "jobs" / "demo.yaml"
_NOT_BLANK = id(PathText.__metadata__[0])
KAFKA = {"brokers": "b:1", "topics": ["t"]}
ABSOLUTE = ("data.train=/data/train.tsv", "data.test=/data/test.tsv")


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("data.train=logs/*.tsv", "data.train: 'logs/*.tsv'"),
        ("train.checkpoint={url: ckpt, every_steps: 5}", "train.checkpoint.url: 'ckpt'"),
        ("publish={root: models}", "publish.root: 'models'"),
        ("train.dense=ps train.staleness=2 train.elastic={url: rows}", "train.elastic.url: 'rows'"),
        ("publish.local=model", "publish.local: 'model'"),
        ("metrics.file=run.jsonl", "metrics.file: 'run.jsonl'"),
        ("metrics.tensorboard=runs", "metrics.tensorboard: 'runs'"),
        ("tables={C1: {weights: rows.parquet, frozen: true}}", "tables.C1.weights: 'rows.parquet'"),
        ("features={a: {kind: id, column: C1, vocabulary: words.txt}}", "features.a.vocabulary: 'words.txt'"),
    ],
)
def test_a_relative_path_is_refused_at_once(setting: str, path: str) -> None:
    job = load_config(JobConfig, str(DEMO), [*ABSOLUTE, *re.split(r" (?=train)", setting)])
    with pytest.raises(InvalidArgument, match="is not allowed on Ray, where each worker runs") as raised:
        _check_paths(job)
    assert path in str(raised.value)


@pytest.mark.parametrize(
    ("stream", "path"),
    [
        ({"follow": {"files": "log/*"}}, "data.stream.follow.files: 'log/*'"),
        ({"kafka": {**KAFKA, "options_file": "secrets"}}, "data.stream.kafka.options_file: 'secrets'"),
        ({"kafka": KAFKA, "like": "log"}, "data.stream.like: 'log'"),
        (
            {"kafka": {**KAFKA, "protobuf": {"descriptors": "events", "message": "Event"}}},
            "data.stream.kafka.protobuf.descriptors: 'events'",
        ),
    ],
)
def test_a_relative_path_of_a_stream_is_refused_at_once(stream: dict[str, Any], path: str, tmp_path: Path) -> None:
    job = load_config(JobConfig, str(write_stream_job(tmp_path, stream)), ["data.test=/log"])
    with pytest.raises(InvalidArgument, match="is not allowed on Ray, where each worker runs") as raised:
        _check_paths(job)
    assert path in str(raised.value)


def test_each_option_that_is_a_path_is_looked_at() -> None:
    """A new option of that type needs a line in ``_paths``."""
    options = {option_name for model in (JobConfig, *KINDS.values()) for option_name in _path_options(model, "")}
    # Because a job on Ray has no cluster of its own, and days are refused there.
    others = {name for name in options if name.startswith(("cluster.", "data.days."))}
    assert {name.rpartition(".")[2] for name in options - others} == {
        *("train", "test", "vocabulary", "weights", "url", "root", "file", "tensorboard", "local"),
        *("like", "files", "options_file", "descriptors", "start_from"),
    }


def _path_options(model: type[BaseModel], before: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        parts = _parts(field.annotation) | {*map(id, field.metadata)}
        if _NOT_BLANK in parts:
            yield before + name
        for part in _models(field.annotation):
            yield from _path_options(part, f"{before}{name}.")


def _parts(annotation: Any) -> set[int]:
    found = {id(each) for each in getattr(annotation, "__metadata__", ())}
    return found.union(*map(_parts, get_args(annotation)))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def test_absolute_paths_and_urls_are_taken() -> None:
    _check_paths(load_config(JobConfig, DEMO, [*ABSOLUTE, "publish={root: s3://models}"]))
