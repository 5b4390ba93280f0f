"""Lookups of a model on a device: the same rows and sums as on the host, and few crossings, whatever the tables."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sparserow as sr
from sparserow.cpp_ext.device import lookup_math
from sparserow.deploy.bench.counting_device import COUNTS, device

DIM, ROWS = 4, 50


class Net(nn.Module):
    """Tables of every kind of lookup, and a dense layer behind them."""

    def __init__(self, tables: int = 3) -> None:
        super().__init__()
        self.one = nn.ModuleList(nn.Embedding(ROWS, DIM, padding_idx=3) for _ in range(tables))
        self.sum = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=3)
        self.mean = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.max = nn.EmbeddingBag(ROWS, DIM, mode="max", include_last_offset=True)
        self.weighted = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=3)
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(DIM * (tables + 4), 1)

    def forward(self, ids: Tensor, flat: Tensor, offsets: Tensor) -> Tensor:
        weights = self.scale.expand(ids.shape[0], 4)
        last = offsets.new_full((1,), flat.shape[0])
        parts = [
            *(table(ids[:, 0]) for table in self.one),
            self.sum(ids),
            self.mean(flat, offsets),
            self.max(flat, torch.cat([offsets, last])),
            self.weighted(ids, None, weights),
        ]
        return self.head(torch.tanh(torch.cat(parts, 1))).squeeze(1)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, ROWS, (8, 4), generator=generator)
    flat = torch.randint(0, ROWS, (30,), generator=generator)
    cuts = torch.sort(torch.randint(0, 30, (7,), generator=generator)).values
    cuts[2] = cuts[3]  # an empty bag
    return ids, flat, torch.cat([torch.zeros(1, dtype=torch.int64), cuts])


@pytest.fixture
def cluster() -> sr.InProcessCluster:
    return sr.InProcessCluster(shards=2)


def distributed(session: sr.Session, tables: int = 3) -> Net:
    torch.manual_seed(0)
    return session.distribute(Net(tables), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1, carry_weights=True)


def train(session: sr.Session, where: torch.device, *, ids_there: bool, steps: int = 12) -> list[Tensor]:
    model = distributed(session).to(where)
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    outs = []
    for seed in range(steps):
        ids, flat, offsets = batch(seed)
        given = (ids.to(where), flat.to(where), offsets.to(where)) if ids_there else (ids, flat, offsets)
        out = model(*given)
        outs.append(out.detach().cpu())
        out.square().mean().backward()
        session.step(dense)
    model.eval()
    outs.append(model(*batch(99)).detach().cpu())
    return outs


@pytest.mark.parametrize("ids_there", [False, True], ids=["ids on the host", "ids on the device"])
def test_training_on_a_device_gives_the_bits_of_the_host(cluster: sr.InProcessCluster, ids_there: bool) -> None:
    with cluster.connect("host") as session:
        expected = train(session, torch.device("cpu"), ids_there=False)
    with cluster.connect("device") as session:
        got = train(session, device(), ids_there=ids_there)
    for step, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert torch.equal(one, other), step


class Mixed(nn.Module):
    """Lookups of random kinds, some of them of one table; a forward uses a random part of their outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.kinds = [
            self.random.choice(["rows", "rows 2-D", "bags", "short", "offsets", "to the end"]) for _ in range(12)
        ]
        self.layers = nn.ModuleList()
        for kind in self.kinds:
            dim, padding = self.random.choice([4, 4, 8]), self.random.choice([None, 3])
            if "rows" in kind:
                layer: nn.Module = nn.Embedding(ROWS, dim, padding_idx=padding)
            else:
                mode = self.random.choice(["sum", "mean", "max"])
                last = kind == "to the end"
                layer = nn.EmbeddingBag(ROWS, dim, mode=mode, padding_idx=padding, include_last_offset=last)
            self.layers.append(layer)
        self.again = self.random.sample(range(12), 2)  # are called twice a forward
        self.is_weighted = {
            at
            for at, layer in enumerate(self.layers)
            if getattr(layer, "mode", "") == "sum" and self.random.random() < 0.5
        }

    def forward(self, ids: Tensor, flat: Tensor, offsets: Tensor, weights: Tensor, used: Tensor) -> Tensor:
        """Of ids (12, 8, 4), flat (12, 30), offsets (12, 9), weights (12, 30) and the outputs that count (14)."""
        outs = []
        for at in [*range(12), *self.again]:
            kind, layer = self.kinds[at], self.layers[at]
            if kind == "rows":
                outs.append(layer(flat[at]))
            elif kind == "rows 2-D" or kind == "bags":
                outs.append(layer(ids[at]))
            elif kind == "short":
                outs.append(layer(ids[at, :, :3]))
            else:
                ends = offsets[at] if kind == "to the end" else offsets[at, :8]
                outs.append(layer(flat[at], ends, weights[at] if at in self.is_weighted else None))
        return torch.stack([(1 + at) * out.square().sum() for at, out in enumerate(outs) if used[at]]).sum()


def mixed_batch(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.sort(torch.randint(0, 31, (12, 7), generator=generator), dim=1).values
    offsets = torch.cat([torch.zeros(12, 1, dtype=torch.int64), cuts, torch.full((12, 1), 30)], 1)
    ids = torch.randint(0, ROWS, (12, 8, 4), generator=generator)
    flat, weights = torch.randint(0, ROWS, (12, 30), generator=generator), torch.rand(12, 30, generator=generator)
    return ids, flat, offsets, weights, torch.rand(14, generator=generator) < 0.8


def rows_after(session: sr.Session, seed: int, where: torch.device, *, ahead: bool) -> list[Tensor]:
    """Returns the rows of all tables after some steps."""
    torch.manual_seed(seed)
    model = session.distribute(Mixed(seed), optimizer=sr.optim.SGD(lr=0.01), min_rows=1, carry_weights=True).to(where)
    batches: Any = [mixed_batch(seed * 100 + step) for step in range(6)]
    if ahead:
        batches = session.prefetch(batches, depth=2, device=where, on_host=lambda given: [given[4]])
    elif where.type != "cpu":
        batches = [(*(each.to(where) for each in given[:4]), given[4]) for given in batches]
    for given in batches:
        model(*given).backward()
        session.step()
    return [torch.from_numpy(session.table(f"layers.{at}").pull(range(ROWS))) for at in range(12)]


@pytest.mark.parametrize("ahead", [False, True], ids=["in the forward", "prefetched"])
@pytest.mark.parametrize("seed", range(6))
def test_lookups_of_many_kinds_give_the_rows_of_the_host(cluster: sr.InProcessCluster, seed: int, ahead: bool) -> None:
    with cluster.connect(f"mixed host {seed} {ahead}") as session:
        expected = rows_after(session, seed, torch.device("cpu"), ahead=False)
    with cluster.connect(f"mixed device {seed} {ahead}") as session:
        got = rows_after(session, seed, device(), ahead=ahead)
    for at, (one, other) in enumerate(zip(expected, got, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda text, at=at: f"table {at}: {text}")


def test_results_are_on_the_device_and_the_anchor_follows(cluster: sr.InProcessCluster) -> None:
    with cluster.connect("there") as session:
        model = distributed(session).to(device())
        assert model.one[0].anchor.device == device()
        assert model.one[0](torch.tensor([1, 2])).device == device()
        assert model(*batch(0)).device == device()


@pytest.mark.parametrize("tables", [1, 3, 40])
def test_gradients_come_back_in_one_copy_whatever_the_tables(cluster: sr.InProcessCluster, tables: int) -> None:
    with cluster.connect(f"back{tables}") as session:
        model = distributed(session, tables).to(device())
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            COUNTS.reset()
            model(*batch(seed)).square().mean().backward()
            session.step(dense)
            assert (COUNTS.to_host, COUNTS.waits) == (1, 0), COUNTS.log


@pytest.mark.parametrize("tables", [1, 40])
def test_rows_cross_in_one_copy_without_prefetch(cluster: sr.InProcessCluster, tables: int) -> None:
    """From the second forward on; offsets that the loop left on the host cost a copy each."""
    with cluster.connect(f"there{tables}") as session:
        model = distributed(session, tables).to(device())
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(4):
            ids, flat, offsets = batch(seed)
            there = offsets.to(device())
            COUNTS.reset()
            model(ids, flat, there).square().mean().backward()
            session.step(dense)
            assert seed == 0 or COUNTS.to_device == 1, COUNTS.log
        model.eval()
        COUNTS.reset()
        with torch.no_grad():
            model(ids, flat, there)
        assert (COUNTS.to_device, COUNTS.to_host) == (1, 0), COUNTS.log
        assert session.stats().lookups_missed == 0


class Gathers(TorchDispatchMode):
    """Counts the lookups of each call of ``gather_all``."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.sparserow.gather_all.default:
            self.lookups.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tables", [1, 40])
def test_a_forward_makes_the_rows_of_all_lookups_by_one_op(cluster: sr.InProcessCluster, tables: int) -> None:
    """The lookup with weights, which are the model's, and the one of offsets that the model makes are beside it."""
    with cluster.connect(f"one{tables}") as session:
        model = distributed(session, tables).to(device())
        for seed in range(3):
            with Gathers() as gathers:
                out = model(*batch(seed))
            out.square().mean().backward()
            session.step()
            assert seed == 0 or sorted(gathers.lookups) == [1, 1, tables + 2]


def test_a_gradient_after_the_step_is_refused(cluster: sr.InProcessCluster) -> None:
    """The test calls the op itself, since torch ends the process when a backward of this device raises an error."""
    with cluster.connect("late") as session:
        layer = distributed(session).to(device()).one[0]
        ids = torch.tensor([1, 2])
        rows, late = layer(ids), layer(ids)
        rows.sum().backward()
        session.step()
        arguments = ([ids], [ids], [ids], [], layer.binding, [DIM, -1, 3, 0, 0, 0], [0])
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"call backward before session\.step"):
            torch.ops.sparserow.stage_all([torch.ones_like(late)], *arguments)


def test_a_lookup_that_no_gradient_reaches_creates_no_row(cluster: sr.InProcessCluster) -> None:
    with cluster.connect("unused") as session:
        model = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(2))
        session.distribute(model, optimizer=sr.optim.SGD(lr=0.1), min_rows=1, carry_weights=False)
        model.to(device())
        used, _ = model[0](torch.tensor([1, 2])), model[1](torch.tensor([1, 2]))
        used.sum().backward()
        session.step()
        assert [sum(len(keys) for keys, _ in session.table(name).scan()) for name in ("0", "1")] == [2, 0]


class Widths(nn.Module):
    """Tables of two widths in turns, of bags too; the model changes rows that it was given in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(ROWS, 4 + 2 * (i % 2), padding_idx=3 if i == 2 else None) for i in range(5)
        )
        self.max, self.mean = nn.EmbeddingBag(ROWS, 6, mode="max"), nn.EmbeddingBag(ROWS, 4, mode="mean")
        self.head = nn.Linear(38, 1)

    def forward(self, ids: Tensor, backwards: bool) -> Tensor:
        numbers = [4, 3, 2, 1, 0] if backwards else [0, 1, 2, 3, 4]
        rows = {i: self.tables[i](ids[:, i % 4]).mul_(2.0).relu_() for i in numbers}
        parts = [rows[i] for i in range(5)] + [self.tables[0](ids[:, 1]).neg_(), self.max(ids), self.mean(ids)]
        return self.head(torch.tanh(torch.cat(parts, 1))).squeeze(1)


@pytest.mark.parametrize("cached", [False, True], ids=["pulled", "cached"])
def test_tables_of_several_widths_whose_rows_are_changed_in_place(cluster: sr.InProcessCluster, cached: bool) -> None:
    ends = []
    for number, where in enumerate((torch.device("cpu"), device())):
        torch.manual_seed(0)
        cache = sr.RowCache(1 << 20) if cached else None
        with cluster.connect(f"widths-{cached}-{number}", cache=cache) as session:
            model = session.distribute(Widths(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1, carry_weights=True)
            model = model.to(where)
            dense, outs = torch.optim.SGD(model.parameters(), lr=0.1), []
            for seed in range(10):
                out = model(batch(seed)[0], seed % 3 == 2)
                outs.append(out.detach().cpu())
                out.square().mean().backward()
                session.step(dense)
            ends.append(outs)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


class Squares(nn.Module):
    """Twelve tables of two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 4 + 2 * (i % 2)) for i in range(12))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([table(ids[:, i % 4]).square().sum() for i, table in enumerate(self.tables)]).sum()


def test_a_forward_gathers_and_a_step_sums_once_a_width(
    cluster: sr.InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = {"gather": 0, "sum_entries": 0}
    for name in called:
        plain = getattr(lookup_math, name)

        def counted(*args: Any, name: str = name, plain: Any = plain, **kwargs: Any) -> Any:
            called[name] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(lookup_math, name, counted)
    with cluster.connect("once") as session:
        model = session.distribute(Squares(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1).to(device())
        for seed in range(4):
            ids, before = batch(seed)[0].to(device()), dict(called)
            model(ids).backward()
            session.step()
        assert {name: count - before[name] for name, count in called.items()} == {"gather": 2, "sum_entries": 2}
