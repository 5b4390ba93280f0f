"""Every optimizer on a running cluster: saved and restored, read in pages, its first rows, and those of torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn, optim

import sparserow as sr
from sparserow.proto.optim import OPTIMIZERS

DIM, KEYS = 4, np.arange(50, dtype=np.uint64)
EVERY = {
    **{kind: each() for kind, each in OPTIMIZERS.items()},
    "adamw": sr.optim.AdamW(),
    "amsgrad": sr.optim.Adam(amsgrad=True),
    "rmsprop-full": sr.optim.RMSprop(momentum=0.5, centered=True),
    "ftrl-group": sr.optim.FTRL(l1=0.2, group_lasso=0.1),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as cluster:
        yield cluster


def push(session: sr.Session, seed: int) -> None:
    random = np.random.default_rng(seed)
    for name in EVERY:
        session.table(name).push(KEYS, random.standard_normal((len(KEYS), DIM), np.float32), lr=0.05)


def weights(session: sr.Session) -> np.ndarray:
    return np.stack([session.table(name).pull(KEYS) for name in EVERY])


def test_a_restore_goes_on_as_if_nothing_had_been(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    with sr.connect(cluster.address, "saved", staleness=None, rank=0, world_size=1) as session:
        for name, optimizer in EVERY.items():
            session.create_table(name, dim=DIM, optimizer=optimizer, init=sr.Uniform(-0.5, 0.5))
        for seed in range(3):
            push(session, seed)
        session.save(str(tmp_path))
        push(session, 3)
        expected = weights(session)
        push(session, 4)
        assert not np.array_equal(weights(session), expected)
        session.restore(str(tmp_path))
        push(session, 3)
        np.testing.assert_array_equal(weights(session), expected)
        exported = str(tmp_path / "rows.parquet")
        session.table("lamb").export(exported)
        session.table("lion").load(exported)
        np.testing.assert_array_equal(session.table("lion").pull(KEYS), session.table("lamb").pull(KEYS))

        session.core.catalog.drop_table("saved", "adam")
        session.create_table("adam", dim=DIM, optimizer=sr.optim.Adam(amsgrad=True), init=sr.Uniform(-0.5, 0.5))
        words = r"has optimizer Adam with amsgrad, the checkpoint has Adam; .*where saved/adam\.optimizer is in accept"
        with pytest.raises(sr.errors.FailedPrecondition, match=words):
            session.restore(str(tmp_path))
        session.restore(str(tmp_path), accept=["adam.optimizer"])
        push(session, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.given = nn.Embedding(200, DIM), nn.Embedding(200, DIM)
        self.set = nn.Embedding(200, DIM)
        nn.init.uniform_(self.set.weight, -0.5, 0.5)


def test_with_l1_rows_begin_at_zero_unless_they_are_given(cluster: sr.LocalCluster) -> None:
    given = {"given": sr.Table(init=sr.Constant(2.0))}
    for namespace, optimizer, usual in (
        ("l1", sr.optim.FTRL(l1=1.0), sr.Constant(0.0)),
        ("group", sr.optim.FTRL(group_lasso=1.0), sr.Constant(0.0)),
        ("l2", sr.optim.FTRL(l2=1.0), sr.Normal(0.0, 1.0)),
    ):
        with sr.connect(cluster.address, namespace, staleness=None, rank=0, world_size=1) as session:
            with sr.deferred(min_rows=100):
                model = Model()
            session.distribute(model, optimizer=optimizer, min_rows=100, tables=given)
            inits = {schema.name: schema.init for schema in session.core.catalog.list_tables(namespace)}
            assert inits == {"plain": usual, "given": sr.Constant(2.0), "set": sr.Uniform(-0.5, 0.5)}
            assert session.create_table("own", dim=DIM, optimizer=optimizer).schema.init == sr.Constant(0.0)


class OneTable(nn.Module):
    """One embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(200, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.item(ids).square().sum()


def test_rows_train_as_torch_trains_them(cluster: sr.LocalCluster) -> None:
    torch.manual_seed(7)
    local = OneTable()
    with sr.connect(cluster.address, "trained") as session:
        far = OneTable()
        far.load_state_dict(local.state_dict())
        named = {"item": sr.Table(optimizer=partial(optim.Adagrad, lr=0.3))}
        session.distribute(far, optimizer=optim.SGD, min_rows=100, tables=named)
        assert session.create_table("own", dim=4, optimizer=optim.Adam).schema.optimizer == sr.optim.Adam(lr=1e-3)
        optimizer = optim.Adagrad(local.parameters(), lr=0.3)
        for step in range(5):
            ids = torch.arange(step, 100 + step)
            for model in (local, far):
                model(ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
        torch.testing.assert_close(far.eval().item(torch.arange(200)), local.item.weight.detach())
        with pytest.raises(sr.errors.InvalidArgument, match=r"distribute\.optimizer: torch\.optim\.Adamax"):
            session.distribute(OneTable(), optimizer=optim.Adamax, min_rows=100)
        other = {"item": sr.Table(optimizer=optim.Adamax)}
        with pytest.raises(
            sr.errors.InvalidArgument, match=r"distribute: tables\['item'\]\.optimizer: torch\.optim\.Adamax"
        ):
            session.distribute(OneTable(), optimizer=optim.SGD, min_rows=100, tables=other)
        with pytest.raises(sr.errors.InvalidArgument, match=r"create_table\.optimizer: torch\.optim\.Adamax"):
            session.create_table("new", dim=4, optimizer=optim.Adamax)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item, self.tower = nn.Embedding(200, DIM), nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tower(self.item(ids)).square().sum()


def test_a_dense_tower_on_servers_trains_as_torchs_adamw(cluster: sr.LocalCluster) -> None:
    torch.manual_seed(7)
    local = Net()
    with sr.connect(cluster.address, "tower", rank=0, world_size=1) as session:
        far = Net()
        far.load_state_dict(local.state_dict())
        session.distribute(far, optimizer=optim.SGD, min_rows=100)
        session.dense_on_servers(far, optimizer=optim.AdamW)
        optimizers = optim.SGD(local.item.parameters()), optim.AdamW(local.tower.parameters())
        for step in range(5):
            ids = torch.arange(step, 100 + step)
            for model in (local, far):
                model(ids).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            session.step()
        far.eval()(torch.arange(3))  # reads the newest parameters
        torch.testing.assert_close(far.tower.weight, local.tower.weight)
        assert (far.tower.weight - local.tower.weight).abs().max() < 1e-6
