"""Rows and gradients of 16 bits on the wire, over real shards: what a step says it has taken is in the rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import sparserow as sr

WIRES = ["float32", "float16", "bfloat16"]
HALF_UNIT = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # of gradients, and of their roots
narrow = pytest.mark.parametrize("wire", WIRES[1:])


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as cluster:
        yield cluster


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(100, 4)
        nn.init.zeros_(self.e.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.e(ids)


def distributed(session: sr.Session, optimizer: sr.RowOptimizer) -> nn.Module:
    return session.distribute(Net(), optimizer=optimizer, min_rows=1)


def rows_of(cluster: sr.LocalCluster, name: str, table: str, keys: list[int]) -> torch.Tensor:
    """The rows as a session reads them whose wire has all bits."""
    with sr.connect(cluster.address, name) as session:
        return torch.as_tensor(session.table(table).pull(keys))


def trained(
    cluster: sr.LocalCluster,
    name: str,
    wire: str,
    optimizer: sr.RowOptimizer,
    gradients: dict[int, float],
    steps: int = 1,
) -> torch.Tensor:
    with sr.connect(cluster.address, name, wire_dtype=wire) as session:
        model = distributed(session, optimizer)
        ids = torch.tensor(list(gradients))
        for _ in range(steps):
            (model(ids) * torch.tensor(list(gradients.values())).unsqueeze(1)).sum().backward()
            assert session.step()
    return rows_of(cluster, name, "e", list(gradients))


@narrow
def test_gradients_beyond_float16_move_their_rows(cluster: sr.LocalCluster, wire: str) -> None:
    rows = trained(cluster, f"large-{wire}", wire, sr.optim.SGD(lr=1e-6), {3: 1e5, 4: -3e9, 5: 7.0})
    torch.testing.assert_close(rows[:, 0], torch.tensor([-0.1, 3e3, -7e-6]), rtol=HALF_UNIT[wire], atol=0)


@narrow
def test_gradients_below_float16_train(cluster: sr.LocalCluster, wire: str) -> None:
    gradients = {3: 2e-8, 4: 1e-12, 5: 0.5}
    adagrad = sr.optim.Adagrad(lr=0.1, eps=1e-20)
    rows = trained(cluster, f"small-{wire}", wire, adagrad, gradients, steps=50)
    exact = trained(cluster, f"small-exact-{wire}", "float32", adagrad, gradients, steps=50)
    assert exact.abs().min() > 0.5
    torch.testing.assert_close(rows, exact, rtol=HALF_UNIT[wire], atol=0)


@narrow
def test_one_commit_has_rows_that_differ_by_2_to_the_45(cluster: sr.LocalCluster, wire: str) -> None:
    gradients = {key: 1.5 * 2.0 ** (key - 45) for key in range(91)}
    rows = trained(cluster, f"wide-{wire}", wire, sr.optim.SGD(lr=1.0), gradients)
    torch.testing.assert_close(rows[:, 0], -torch.tensor(list(gradients.values())), rtol=0, atol=0)


@narrow
def test_pushes_and_assigned_rows_by_key_have_any_magnitude(cluster: sr.LocalCluster, wire: str) -> None:
    name = f"keys-{wire}"
    keys = np.arange(91)
    values = np.repeat((1.5 * 2.0 ** (keys - 45)).astype(np.float32)[:, None], 3, axis=1)
    with sr.connect(cluster.address, name, wire_dtype=wire) as session:
        session.create_table("t", dim=3, optimizer=sr.optim.SGD(lr=1.0)).push(keys, values)
    np.testing.assert_array_equal(rows_of(cluster, name, "t", keys.tolist()).numpy(), -values)
    with sr.connect(cluster.address, name, wire_dtype=wire) as session:
        session.table("t").assign(keys, values)
    np.testing.assert_array_equal(rows_of(cluster, name, "t", keys.tolist()).numpy(), values)


@narrow
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_part_of_the_vote(cluster: sr.LocalCluster, wire: str, policy: str, value: float) -> None:
    name = f"nonfinite-{wire}-{policy}-{value}"
    with sr.connect(cluster.address, name, wire_dtype=wire, on_nonfinite=policy) as session:
        model = distributed(session, sr.optim.SGD(lr=1.0))
        (model(torch.tensor([1, 2])) * torch.tensor([[1.0], [value]])).sum().backward()
        if policy == "raise":
            with pytest.raises(sr.errors.SparserowError, match="key 2"):
                session.step()
        else:
            assert not session.step()
    assert torch.equal(rows_of(cluster, name, "e", [1, 2]), torch.zeros(2, 4))


def test_a_row_beyond_float16_is_refused_by_the_name_of_its_table(cluster: sr.LocalCluster) -> None:
    with sr.connect(cluster.address, "beyond") as session:
        distributed(session, sr.optim.SGD(lr=1.0))
        session.table("e").assign([7, 8], np.full((2, 4), 65_504.0, np.float32))
    text = r"wire_dtype: 'float16' is not allowed; allowed: float32, because the row of key 8 of table .*\be\b"
    with sr.connect(cluster.address, "beyond", wire_dtype="float16") as session:
        model = distributed(session, sr.optim.SGD(lr=1.0))
        assert float(model(torch.tensor([7, 8])).min()) == 65_504
        session.step(allow_empty=True)
        session.table("e").assign([8], np.full((1, 4), 1e6, np.float32))  # what is sent has no such limit
        with pytest.raises(sr.errors.InvalidArgument, match=text):
            session.table("e").pull([7, 8])
        with pytest.raises(sr.errors.InvalidArgument, match=text):
            model(torch.tensor([7, 8]))
        assert float(session.table("e").pull([7]).max()) == 65_504  # the session goes on
    with sr.connect(cluster.address, "beyond", wire_dtype="bfloat16") as session:
        np.testing.assert_allclose(session.table("e").pull([8]), 1e6, rtol=2**-8)


@narrow
def test_dense_tensors_on_servers_train_with_gradients_of_any_magnitude(cluster: sr.LocalCluster, wire: str) -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(100, 4)
            self.weights = nn.Parameter(torch.zeros(3, 64))  # three rows of the dense table

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.e(ids).sum() + (self.weights * torch.tensor([[2.0**-40], [1.0], [2.0**40]])).sum()

    name = f"dense-{wire}"
    with sr.connect(cluster.address, name, wire_dtype=wire) as session:
        model = session.distribute(Tower(), optimizer=sr.optim.SGD(lr=1.0), min_rows=1)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=1.0))
        model(torch.tensor([1])).backward()
        assert session.step()
    rows = rows_of(cluster, name, "dense", [0, 1, 2])
    assert sorted(rows[:, 0].tolist()) == [-(2.0**40), -1.0, -(2.0**-40)]
    assert torch.equal(rows, rows[:, :1].expand(3, 64))
