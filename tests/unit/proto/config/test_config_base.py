"""The configuration base: file and assignments to a validated model, and errors that say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from sparserow.proto.config.cluster_config import ClusterConfig
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.options.document import load_config, validate
from sparserow.proto.options.strict_model import Bytes, FromList, Seconds, StrictModel


class Dense(StrictModel):
    kind: Literal["dense"] = "dense"
    width: int = Field(8, ge=1, le=1024)


class Sparse(StrictModel):
    kind: Literal["sparse"] = "sparse"
    rate: float = Field(0.5, gt=0)


class Job(StrictModel):
    epochs: int = Field(1, ge=1)
    learning_rate: float = Field(0.1, gt=0)
    mode: Literal["sync", "async"] | None = "sync"
    columns: Annotated[tuple[str, ...], FromList] = ()
    budget: Bytes | None = None
    pause: Seconds = 1.0
    shuffle: bool = True
    layer: Annotated[Dense | Sparse, Field(discriminator="kind")] = Dense()
    tables: dict[str, Dense] = Field(default_factory=dict)
    cluster: ClusterConfig = ClusterConfig()


def load(tmp_path: Path, text: str, *overrides: str) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_config(Job, path, overrides)


def test_a_file_and_assignments_make_a_model(tmp_path: Path) -> None:
    job = load(
        tmp_path,
        "epochs: 3\nlearning_rate: 1e-3\ncolumns: [a, b]\nbudget: 8GiB\npause: 250ms\ncluster: {shards: 4}\n",
        "epochs=5",
        "columns=[no, on]",
        "columns.1=c",
        "layer.kind=sparse",
        "layer.rate=2",
        "tables.user.width=16",
        "mode=null",
        "shuffle=false",
    )
    assert job.epochs == 5
    assert job.learning_rate == 1e-3
    assert job.columns == ("no", "c")
    assert job.budget == 8 * 2**30
    assert job.pause == 0.25
    assert job.layer == Sparse(rate=2.0)
    assert job.tables == {"user": Dense(width=16)}
    assert job.mode is None
    assert job.shuffle is False
    assert job.cluster.shards == 4
    assert load_config(Job) == Job()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("epoch=2", "epoch: unknown key; did you mean 'epochs'?"),
        ("zzz=2", "zzz: unknown key; known keys: epochs, learning_rate, mode, columns"),
        ("cluster.shard=2", "cluster.shard: unknown key; did you mean 'shards'?"),
        ("tables.user.widht=2", "tables.user.widht: unknown key; did you mean 'width'?"),
        ("layer.widht=2", "layer.kind: is missing; allowed: dense, sparse"),
        ("epochs=0", "epochs: 0 is not allowed; allowed: an integer >= 1"),
        ("epochs=1.5", "epochs: 1.5 is not allowed; allowed: an integer >= 1"),
        ("epochs=two", "epochs: 'two' is not allowed; allowed: an integer >= 1"),
        ("epochs=true", "epochs: True is not allowed; allowed: an integer >= 1"),
        ("learning_rate=.nan", "learning_rate: nan is not allowed; allowed: a number > 0"),
        ("mode=k", "mode: 'k' is not allowed; allowed: sync, async or null"),
        ("shuffle=yes", "shuffle: 'yes' is not allowed; allowed: true or false"),
        ("columns=a", "columns: 'a' is not allowed; allowed: a sequence of: text"),
        ("columns=[a, 1]", "columns.1: 1 is not allowed; allowed: a sequence of: text"),
        ("budget=8Gib", "budget: '8Gib' is not allowed; allowed: bytes, such as 512MiB or 8GiB"),
        ("pause=-1s", "pause: '-1s' is not allowed; allowed: seconds, such as 10"),
        ("layer.kind=dens", "layer.kind: 'dens' is not allowed; allowed: dense, sparse"),
        ("tables.user.width=0", "tables.user.width: 0 is not allowed; allowed: an integer >= 1 and <= 1024"),
        ("cluster=2", "cluster: 2 is not allowed; allowed: a section of address, shards"),
        ("cluster.slot_count=1000", "cluster.slot_count: 1000 is not allowed; allowed: a power of two in [2, 65536]"),
        ("epochs", "--set: 'epochs' is not allowed; allowed: KEY.KEY=VALUE"),
        ("a..b=1", "--set: 'a..b=1' is not allowed; allowed: KEY.KEY=VALUE"),
        ("epochs.x=1", "--set epochs.x: epochs is a single value and has no key 'x'"),
        ("columns.7=c", "--set columns.7: '7' is not allowed; allowed: an index below 2"),
        ("epochs=[", "--set epochs: not YAML:"),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(tmp_path: Path, assignment: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load(tmp_path, "epochs: 3\ncolumns: [a, b]\n", assignment)
    text = str(caught.value).removeprefix(f"{tmp_path / 'job.yaml'}: ")
    assert text.startswith(message)
    assert "\n" not in text


def test_a_section_of_a_union_reports_its_own_fields(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"layer\.rate: 0 is not allowed; allowed: a number > 0"):
        load(tmp_path, "layer: {kind: sparse, rate: 0}\n")
    with pytest.raises(InvalidArgument, match=r"layer\.rat: unknown key; did you mean 'rate'\?"):
        load(tmp_path, "layer: {kind: sparse, rat: 1}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: 1\nepochs: 2\n", "line 2: the key 'epochs' stands twice"),
        ("1: 2\n", "line 1: key: 1 is not allowed; allowed: text"),
        ("epochs: [\n", "not YAML:"),
        ("- a\n", "the document is a list; allowed: a mapping of keys"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "job.yaml") in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"none\.yaml: cannot be read"):
        load_config(Job, tmp_path / "none.yaml")


def test_more_than_one_error_is_counted() -> None:
    with pytest.raises(InvalidArgument, match=r"\(and 1 more\)$"):
        validate(Job, {"epochs": 0, "learning_rate": -1.0})


def test_options_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="cluster: memory_budget has no effect on a running cluster"):
        validate(Job, {"cluster": {"address": "h:1", "memory_budget": 1}})
    assert validate(Job, {"cluster": {"address": "h:1"}}).cluster.address == "h:1"


def test_models_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Job().epochs = 2  # type: ignore[misc]
