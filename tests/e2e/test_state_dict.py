"""A distributed model's ``state_dict``: small handles in place of rows, kept by torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import sparserow as sr
from sparserow.proto.errors import DataLoss, FailedPrecondition

ROWS = 100_000


class Model(nn.Module):
    def __init__(self, name: str = "user") -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Embedding(ROWS, 16))
        self.bag = nn.EmbeddingBag(ROWS, 8, mode="sum")
        self.head = nn.Linear(24, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = getattr(self, self.name)(ids[:, 0])
        return self.head(torch.cat([rows, self.bag(ids)], dim=1)).squeeze(-1)


def made(session, name: str = "user"):
    with sr.deferred(min_rows=1000):
        model = Model(name)
    return session.distribute(model, optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1000)


def step(session, model, dense) -> None:
    model(torch.arange(64).reshape(32, 2)).sum().backward()
    session.step(dense)


@pytest.fixture(scope="module")
def cluster():
    with sr.local_cluster(shards=2, slot_count=64) as running:
        yield running


def test_it_holds_handles_and_no_rows(cluster):
    with sr.connect(cluster.address, "small", rank=0, world_size=1) as session:
        state = made(session).state_dict()
    assert set(state) == {"user._extra_state", "bag._extra_state", "head.weight", "head.bias"}
    assert sum(value.numel() * value.element_size() for value in state.values()) < 1000
    assert b'"table": "small/user"' in bytes(state["user._extra_state"].tolist())


def test_distributed_checkpoint_keeps_it(cluster, tmp_path):
    """The dense side by DCP, the rows by ``session.save``: both come back to another cluster."""
    ids = torch.arange(40).reshape(20, 2)
    with sr.connect(cluster.address, "dcp", rank=0, world_size=1) as session:
        model = made(session)
        dense = torch.optim.Adam(model.parameters(), lr=0.1)
        step(session, model, dense)
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "dense"), no_dist=True)
        session.save(str(tmp_path / "rows"))
        expected = model.eval()(ids)
    with (
        sr.local_cluster(shards=1, slot_count=64) as other,
        sr.connect(other.address, "dcp", rank=0, world_size=1) as session,
    ):
        again = made(session)
        state = {"model": again.state_dict()}
        dcp.load(state, checkpoint_id=str(tmp_path / "dense"), no_dist=True)
        with pytest.raises(FailedPrecondition, match=r"dcp/user on cluster [0-9a-f]{16}, whose rows are not on this"):
            again.load_state_dict(state["model"])
        session.restore(str(tmp_path / "rows"))
        again.load_state_dict(state["model"])
        torch.testing.assert_close(again.eval()(ids), expected, rtol=0, atol=0)
        copied = sr.copy_sharing_rows(again)
        copied.load_state_dict(state["model"])


def test_a_handle_of_another_table_is_refused(cluster, tmp_path):
    with sr.connect(cluster.address, "other", rank=0, world_size=1) as session:
        state = made(session).state_dict()
        table = session.table("user")
        table.assign(np.arange(5, dtype=np.uint64), np.ones((5, 16), np.float32))
        session.save(str(tmp_path), model=None)
    with sr.connect(cluster.address, "third", rank=0, world_size=1) as session:
        model = made(session)
        with pytest.raises(
            FailedPrecondition,
            match="the layer's table is third/user of dim 16, the state is of other/user of dim 16",
        ):
            model.load_state_dict(state)
        with pytest.raises(DataLoss, match="third/user is no handle of a table"):
            model.load_state_dict({**model.state_dict(), "user._extra_state": torch.zeros(3, dtype=torch.uint8)})
        model.load_state_dict(model.state_dict())
        plain = {name: value for name, value in model.state_dict().items() if not name.endswith("._extra_state")}
        model.load_state_dict(plain)  # the dense side of a local model
        with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
            model.load_state_dict({"head.weight": plain["head.weight"]})


def test_a_renamed_table_is_known_by_its_present_name(cluster, tmp_path):
    with sr.connect(cluster.address, "renamed", rank=0, world_size=1) as session:
        model = made(session)
        step(session, model, None)
        expected = model.eval()(torch.arange(40).reshape(20, 2))
        session.save(str(tmp_path), model=model)
    with sr.connect(cluster.address, "renamed", rank=0, world_size=1) as session:
        again = made(session, name="person")
        session.restore(str(tmp_path), model=again, renames={"user": "person"})
        ids = torch.arange(40).reshape(20, 2)
        torch.testing.assert_close(again.eval()(ids), expected, rtol=0, atol=0)


def test_a_state_that_is_older_than_the_rows_is_told_by_its_steps(cluster, tmp_path):
    """As the best weights of another library's trainer are; states that come with restored rows are not."""
    ids = torch.arange(8).view(4, 2)

    def trained(session, model, steps: int) -> None:
        for _ in range(steps):
            model(ids).sum().backward()
            session.step(allow_empty=True)

    def told(model, state) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.load_state_dict(state)
        return [str(each.message) for each in found if "load_state_dict" in str(each.message)]

    with sr.connect(cluster.address, namespace="best") as session:
        model = made(session)
        trained(session, model, 3)
        best = copy.copy(model.state_dict())
        assert told(model, best) == []
        session.save(str(tmp_path / "best"), model=model)
        trained(session, model, 5)
        (text,) = told(model, best)
        assert "of before step 3, and the rows of its tables have been trained for 5 steps since" in text
        assert told(model, best) == [], "once"
        assert told(model, model.state_dict()) == []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session.restore(str(tmp_path / "best"), model=model)
        assert told(model, best) == [], "the rows are those of the state again"
        trained(session, model, 2)
        (text,) = told(model, best)
        assert "for 2 steps since" in text
