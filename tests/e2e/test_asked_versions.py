"""Mistakes in what ``publish`` is asked for: each is named before a file is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparserow as sr
from sparserow.deploy import cli

EXAMPLE = (torch.arange(4),)


class Scorer(nn.Module):
    """A table and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(64, 4)
        self.top = nn.Linear(4, 1)

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        return self.top(self.user(user))[:, 0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=1) as cluster:
        yield cluster


@pytest.fixture
def session(cluster: sr.LocalCluster) -> Iterator[sr.Session]:
    with sr.connect(cluster.address, "ads", namespace_policy="continue") as session:
        yield session


@pytest.fixture
def model(session: sr.Session) -> nn.Module:
    return session.distribute(Scorer(), optimizer=sr.optim.SGD(lr=0.1), min_rows=10)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"name": 5}, r"model: 5 is not allowed; allowed: 1 to 100 of"),
        ({"alias": 5}, r"alias: 5 is not allowed; allowed: 1 to 100 of"),
        ({"card": 5}, r"card: type: 'int' is not allowed; allowed: a mapping"),
        ({"card": {"auc": float("nan")}}, r"card\['auc'\]: nan is not finite"),
        ({"model": "ctr"}, r"publish\.model: type: 'str' is not allowed; allowed: a torch\.nn\.Module"),
        ({"example": EXAMPLE[0]}, r"publish\.example: type: 'Tensor' is not allowed; allowed: a tuple"),
        ({"sign": "all"}, r"publish\.sign: 'all' is not allowed; allowed: rows, null"),
        ({"sign": "rows"}, r"publish\.sign: has no effect without a signing_key in the security file"),
        ({"features": 3}, r"publish\.features: type: 'int' is not allowed; allowed: sr\.features\.Features"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_written(
    session: sr.Session, model: nn.Module, tmp_path: Path, wrong: dict[str, Any], text: str
) -> None:
    given: dict[str, Any] = {"name": "ctr", "root": str(tmp_path), "model": model, "example": EXAMPLE, **wrong}
    with pytest.raises(sr.errors.InvalidArgument, match=text):
        session.publish(**given)
    assert list(tmp_path.iterdir()) == []


def test_a_session_that_is_closed_publishes_nothing(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    root = str(tmp_path)
    with sr.connect(cluster.address, "closed") as session:
        model = session.distribute(Scorer(), optimizer=sr.optim.SGD(lr=0.1), min_rows=10)
        session.publish("ctr", root=root, model=model, example=EXAMPLE)
        dense = sr.DensePublisher(session, "ctr", root=root, model=model)
    with pytest.raises(sr.errors.FailedPrecondition, match="session is closed"):
        session.publish("ctr", root=root)
    with pytest.raises(sr.errors.FailedPrecondition, match="session is closed"):
        dense.publish()


def test_a_table_that_is_to_be_left_out_must_exist(
    cluster: sr.LocalCluster, model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["publish", "ctr", f"--root={tmp_path}", "--namespace=ads", f"--coordinator={cluster.address}"]
    with pytest.raises(SystemExit, match="1"):
        cli.main([*named, "--without=usr"])
    assert "without: table 'usr' is not in namespace 'ads'; its tables: user" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
