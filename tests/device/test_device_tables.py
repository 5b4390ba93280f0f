"""Tables on a device that is not the host: torch's operations give what the kernels of a shard give, to 1e-6."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import sparserow as sr
from sparserow.cpp_ext.device.link import link_of
from sparserow.deploy.bench.counting_device import device
from sparserow.worker.api.in_process import InProcessCluster
from sparserow.worker.device_tables import id_keys
from sparserow.worker.device_tables.device_tables import whole_rows
from sparserow.worker.lookups.makers import device_tables as device_maker

OPTIMIZERS = (
    sr.optim.SGD(lr=0.3, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    sr.optim.SGD(lr=0.3, momentum=0.9, nesterov=True),
    sr.optim.SGD(lr=0.3),
    sr.optim.Adagrad(lr=0.3, initial_accumulator=0.1, weight_decay=1e-3),
    sr.optim.RowWiseAdagrad(lr=0.3),
    sr.optim.Adam(lr=0.05, weight_decay=1e-3),
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Embedding(17, 5, padding_idx=1)
        self.bag = nn.EmbeddingBag(23, 5, mode="mean")
        self.most = nn.EmbeddingBag(23, 5, mode="max")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.row(ids).sum(1) + self.bag(ids) * 2 + self.most(ids)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_a_table_on_a_device_is_as_one_on_servers(optimizer: object) -> None:
    cluster = InProcessCluster(shards=1)
    ends = []
    for placement in ("servers", "device"):
        torch.manual_seed(3)
        model, place = Net(), torch.device("cpu")
        if placement == "device":
            place = device()
            model.to(place)
        with cluster.connect(placement) as session:
            tables = {"*": sr.Table(placement=placement)}
            session.distribute(model, optimizer=optimizer, min_rows=1, tables=tables)
            for step in range(8):
                for micro in range(2):
                    draw = torch.Generator().manual_seed(2 * step + micro)
                    ids = torch.randint(0, 17, (4, 3), generator=draw).to(place)
                    model(ids).square().sum().backward()
                assert session.step(clip_row_norm=20.0)
            assert session.stats().clipped_rows > 0
            if placement == "device":
                assert session.core.device_tables.table("row").weights.device == place
                rows = [whole_rows(session.core.device_tables, name).numpy() for name in ("row", "bag", "most")]
                assert session.stats().rows_pulled == 0
            else:
                sizes = {"row": 17, "bag": 23, "most": 23}
                rows = [session.table(name).pull(np.arange(size)) for name, size in sizes.items()]
            ends.append(rows)
            before = rows
            model(ids).sum().mul(float("nan")).backward()
            with pytest.raises(sr.NonFiniteGradient, match=r"table .* key"):
                session.step()
            if placement == "device":
                after = [whole_rows(session.core.device_tables, name).numpy() for name in ("row", "bag", "most")]
                assert all(map(np.array_equal, before, after))
    for here, there in zip(*ends, strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-6, atol=1e-6)


class Rows(nn.Module):
    """Tables of rows and of bags, one with a padding id."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(17 + i, 5, padding_idx=1 if i == 1 else None) for i in range(tables))
        self.bag = nn.EmbeddingBag(17, 5, mode="sum")

    def forward(self, ids: torch.Tensor, flat: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = [table(ids[:, i % 3]) for i, table in enumerate(self.tables)]
        return torch.stack([*rows, self.bag(flat, offsets)]).sum(0)


def made(session: sr.Session, tables: int) -> Rows:
    torch.manual_seed(3)
    model = Rows(tables).to(device())
    placed = {"*": sr.Table(placement="device")}
    return session.distribute(model, optimizer=sr.optim.SGD(lr=0.5), min_rows=1, tables=placed)


def given(seed: int, ids: int = 17) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, ids, (4, 3), generator=draw),
        torch.randint(0, 17, (6,), generator=draw),
        torch.tensor([0, 2, 2, 5]),
    )


def test_the_host_waits_for_the_device_as_often_with_many_tables_as_with_few() -> None:
    waits = {}
    for tables in (2, 9):
        with InProcessCluster(shards=1).connect(f"waits-{tables}") as session:
            model, crossings = made(session, tables), link_of(device()).crossings
            for seed in range(4):
                before = crossings.waits
                model(*(each.to(device()) for each in given(seed))).square().sum().backward()
                assert session.step()
            waits[tables] = crossings.waits - before
    assert waits[2] == waits[9]


def test_lookups_with_keys_found_together_are_those_found_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for together in (True, False):
        if not together:
            alone = lambda wanted: [  # noqa: E731
                id_keys.keys_of(each.binding, each.ids, each.anchor, padding=each.padding) for each in wanted
            ]
            monkeypatch.setattr(device_maker, "keys_of_all", alone)
        with InProcessCluster(shards=1).connect(f"together-{together}") as session:
            model, outs = made(session, 4), []
            for seed in range(6):
                ids, flat, offsets = given(seed)
                mixed = (ids.to(torch.int32) if seed % 2 else ids.to(device()), flat, offsets)
                out = model(*mixed)
                out.square().sum().backward()
                outs.append(out.detach().cpu())
                assert session.step()
            names = [f"tables.{i}" for i in range(4)] + ["bag"]
            ends.append(outs + [whole_rows(session.core.device_tables, name) for name in names])
    for here, there in zip(*ends, strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("bad", [-1, 18, 2**62])
def test_a_bad_id_is_named_with_its_table_and_nothing_changes(bad: int) -> None:
    with InProcessCluster(shards=1).connect(f"bad-{bad}") as session:
        model = made(session, 3)
        for seed in range(3):
            model(*given(seed)).square().sum().backward()
            assert session.step()
        ids, flat, offsets = given(9)
        ids[2, 1] = bad
        with pytest.raises(sr.errors.InvalidArgument, match=rf"tables.1': id {bad} is not allowed; allowed: \[0, 18\)"):
            model(ids, flat, offsets)
        model(*given(10)).square().sum().backward()
        assert session.step()
