"""The merged pull learns which batch tensors reach which lookups, and is never needed for a right result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr

ROWS, DIM, TABLES = 500, 3, 4
REMAP = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))


class Columns(nn.Module):
    def __init__(self, look: Callable[[Columns, Any], list[Tensor]]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(TABLES))
        self.look = look

    def forward(self, batch: Any, **_: Any) -> Tensor:
        pairs = zip(self.tables, self.look(self, batch), strict=True)
        return torch.stack([table(ids).reshape(-1, DIM).sum(0) for table, ids in pairs])


def matrix(seed: int, rows: int = 7) -> Tensor:
    return torch.randint(0, ROWS, (rows, TABLES), generator=torch.Generator().manual_seed(seed))


WAYS: dict[str, tuple[Callable[[int], Any], Callable[[Columns, Any], list[Tensor]]]] = {
    "columns": (matrix, lambda _, x: [x[:, i] for i in range(TABLES)]),
    "rows": (lambda seed: matrix(seed).t().contiguous(), lambda _, x: [x[i] for i in range(TABLES)]),
    "narrow": (matrix, lambda _, x: [x[:, i : i + 1] for i in range(TABLES)]),
    "int32": (lambda seed: matrix(seed).to(torch.int32), lambda _, x: [x[:, i] for i in range(TABLES)]),
    "nested": (
        lambda seed: {"ids": [matrix(seed)[:, i].contiguous() for i in range(TABLES)], "dense": torch.rand(3)},
        lambda _, x: x["ids"],
    ),
}


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=2).connect("merged") as session:
        yield session


@pytest.mark.parametrize("way", WAYS)
def test_one_pull_serves_all_tables(way: str, session: sr.Session) -> None:
    make, look = WAYS[way]
    torch.manual_seed(1)
    reference = Columns(look)
    torch.manual_seed(1)
    model = session.distribute(Columns(look), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
    torch_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for seed in range(5):
        before = session.stats()
        out = model(make(seed))
        pulls = session.stats().pulls - before.pulls
        assert pulls == (TABLES if seed == 0 else 1)
        torch.testing.assert_close(out, reference(make(seed)), rtol=0, atol=1e-5)
        (out**2).sum().backward()
        (reference(make(seed)) ** 2).sum().backward()
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        session.step()
    assert session.stats().lookups_missed == 0
    model.eval()
    before = session.stats()
    torch.testing.assert_close(model(make(9)), reference(make(9)), rtol=0, atol=1e-5)
    assert session.stats().pulls - before.pulls == 1


def test_computed_ids_are_left_to_the_ops(session: sr.Session) -> None:
    model = session.distribute(
        Columns(lambda _, x: [REMAP[x[:, i]] for i in range(TABLES)]),
        optimizer=sr.optim.SGD(lr=0.1),
        min_rows=1,
    )
    for seed in range(2):
        model(matrix(seed)).sum().backward()
        session.step()
    assert session.stats().pulls == 2 * TABLES
    assert session.stats().pulls_merged == 0


def test_a_wrong_guess_costs_a_pull_and_is_learnt_anew(session: sr.Session) -> None:
    order = list(range(TABLES))
    model = Columns(lambda _, x: [x[:, i] for i in order])
    torch.manual_seed(2)
    session.distribute(model, optimizer=sr.optim.SGD(lr=0.1), min_rows=1)

    def train(seed: int) -> None:
        out = model(matrix(seed))
        rows = [session.table(f"tables.{t}").pull(matrix(seed)[:, i].numpy()).sum(0) for t, i in enumerate(order)]
        torch.testing.assert_close(out.detach(), torch.from_numpy(np.stack(rows)), rtol=0, atol=1e-5)
        out.sum().backward()
        session.step()

    train(0)
    train(1)
    assert session.stats().lookups_missed == 0
    order.reverse()
    train(2)
    missed = session.stats().lookups_missed
    assert missed > 0
    train(3)  # traced anew
    train(4)
    assert session.stats().lookups_missed == missed


def test_batches_of_another_shape_train_as_in_plain_torch(session: sr.Session) -> None:
    def look(_: Columns, ids: Tensor) -> list[Tensor]:
        return [ids[:, i % ids.shape[1]] for i in range(TABLES)]

    torch.manual_seed(1)
    reference = Columns(look)
    torch.manual_seed(1)
    model = session.distribute(Columns(look), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
    torch_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(5)

    def train(shape: tuple[int, int], **others: Any) -> None:
        ids = torch.randint(0, ROWS, shape, generator=draw)
        torch_optimizer.zero_grad()
        out, wanted = model(ids, **others), reference(ids)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)
        out.square().sum().backward()
        wanted.square().sum().backward()
        session.step(allow_empty=shape[0] == 0)
        torch_optimizer.step()

    for shape in ((7, 4), (7, 4), (5, 2), (1, 1), (0, 4), (9, 4)):
        train(shape)
    train((3, 4), other=[1, "text"])
    for t, table in enumerate(reference.tables):
        rows = session.table(f"tables.{t}").pull(np.arange(ROWS))
        torch.testing.assert_close(torch.from_numpy(rows), table.weight.detach(), rtol=0, atol=1e-5)


def test_a_forward_that_replaces_an_entry_of_its_batch_makes_one_pull(session: sr.Session) -> None:
    def look(_: Columns, given: dict[str, Tensor]) -> list[Tensor]:
        given["ids"] = given["ids"] % ROWS
        return [given["ids"][:, i] for i in range(TABLES)]

    model = session.distribute(Columns(look), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
    draw = torch.Generator().manual_seed(3)
    for step in range(6):
        before = session.stats()
        model({"ids": torch.randint(0, 10**9, (7, TABLES), generator=draw)}).sum().backward()
        session.step()
        if step > 0:
            assert session.stats().pulls - before.pulls == 1
    assert session.stats().lookups_missed == 0


def test_micro_batches_in_the_same_memory_are_each_pulled_ahead(session: sr.Session) -> None:
    model = session.distribute(
        Columns(lambda _, x: [x[:, i] for i in range(TABLES)]), optimizer=sr.optim.SGD(lr=0.1), min_rows=1
    )
    batch = torch.empty(70, TABLES, dtype=torch.int64)
    model(matrix(0)).sum().backward()
    session.step()
    for seed in range(1, 5):
        before = session.stats()
        model(batch.copy_(matrix(seed, 70))).sum().backward()
        assert session.stats().pulls - before.pulls == 1
    session.step()
    assert session.stats().lookups_missed == 0
