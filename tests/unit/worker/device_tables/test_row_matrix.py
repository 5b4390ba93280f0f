"""Tables of one width and optimizer are one matrix: their rows are those of servers, whatever a step looks up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.worker.api.in_process import InProcessCluster
from sparserow.worker.device_tables import staged
from sparserow.worker.device_tables.device_tables import whole_rows

ROWS = {"a": 20, "b": 30, "c": 25, "wide": 15}
STEPS = 6


class Net(nn.Module):
    """Rows, bags, a bag with padding, and another width; ``skips`` says which outputs the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(ROWS["a"], 4), nn.EmbeddingBag(ROWS["b"], 4, mode="sum")
        self.c = nn.EmbeddingBag(ROWS["c"], 4, mode="mean", padding_idx=3)
        self.wide = nn.Embedding(ROWS["wide"], 6)

    def forward(self, ids: Tensor, skips: int, repeats: bool) -> Tensor:
        parts = [self.a(ids[:, 0]), self.b(ids), self.c(ids), self.wide(ids[:, 1])]
        if repeats:
            parts.append(self.a(ids[:, 2]))
        return sum(part.square().sum() for at, part in enumerate(parts) if at != skips)


def trained(placement: str, seed: int) -> dict[str, np.ndarray]:
    """Returns the rows of each table after steps of one to three forwards, drawn from a seed."""
    draw = np.random.default_rng(seed)
    with InProcessCluster(shards=2).connect(placement) as session:
        torch.manual_seed(seed)
        model = session.distribute(
            Net(),
            optimizer=sr.optim.Adagrad(lr=0.1),
            min_rows=1,
            tables={"*": sr.Table(placement=placement)},
        )
        for group in session.optimizer.param_groups:
            if group["name"] == "b":
                group["lr"] = 0.03
        for _ in range(STEPS):
            for _ in range(draw.integers(1, 4)):
                ids = torch.from_numpy(draw.integers(0, min(ROWS.values()), (draw.integers(1, 9), 3)))
                model(ids, int(draw.integers(-1, 5)), bool(draw.integers(2))).backward()
            session.step()
        if placement == "device":
            return {name: whole_rows(session.core.device_tables, name).numpy() for name in ROWS}
        return {name: session.table(name).pull(np.arange(rows)) for name, rows in ROWS.items()}


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_those_of_servers(seed: int) -> None:
    here, there = trained("device", seed), trained("servers", seed)
    for name in ROWS:
        np.testing.assert_array_equal(here[name], there[name], err_msg=f"{name}, seed {seed}")


def test_tables_of_one_width_are_one_matrix() -> None:
    with InProcessCluster().connect() as session:
        options = {"optimizer": sr.optim.SGD(lr=0.1), "min_rows": 1, "tables": {"*": sr.Table(placement="device")}}
        session.distribute(Net(), **options)
        tables = session.core.device_tables
        assert list(tables.names) == ["a", "b", "c", "wide"]
        matrices = [tables.table(name).matrix for name in tables.names]
        assert len({id(each) for each in matrices}) == 2
        assert matrices[0] is matrices[1] is matrices[2]
        assert [tables.table(name).first for name in tables.names] == [0, 20, 50, 0]


class Columns(nn.Module):
    def __init__(self, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 4) for _ in range(tables))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([table(ids[:, at]) for at, table in enumerate(self.tables)], 1)


def test_a_plain_step_sums_all_tables_of_a_matrix_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[int] = []
    sum_lookups = staged._sum_lookups
    monkeypatch.setattr(staged, "_sum_lookups", lambda *given: alone.append(1) or sum_lookups(*given))
    with InProcessCluster().connect() as session:
        options = {"optimizer": sr.optim.SGD(lr=0.1), "min_rows": 1, "tables": {"*": sr.Table(placement="device")}}
        model = session.distribute(Columns(5), **options)
        for step in range(3):
            model(torch.randint(0, 20, (8, 5))).square().sum().backward()
            session.step()
            assert step > 0 or len(alone) == 5, "the first forward is learnt from"
    assert len(alone) == 5
