"""Operations of torch that a step with lookups on a device makes: as many for 26 tables as for 104 of one width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.cpp_ext import device_groups, device_ops
from sparserow.cpp_ext.device import lookup_math
from sparserow.deploy.bench.counting_device import COUNTS, device
from sparserow.worker.device_tables.device_tables import whole_rows
from sparserow.worker.lookups.makers import device_tables as device_maker

ROWS, BATCH, STEPS = 50, 8, 5
LEAST_TABLES, MOST_TABLES = 26, 104
MOST = 40
MOST_THERE, WAITS_THERE = 60, 3


class Tables(nn.Module):
    """Tables of one kind and of the given widths, behind one linear layer."""

    def __init__(self, widths: list[int], mode: str | None, padding: int | None = None) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(ROWS, width, padding_idx=padding)
            if mode is None
            else nn.EmbeddingBag(ROWS, width, mode=mode, padding_idx=padding)
            for width in widths
        )
        self.head = nn.Linear(sum(widths), 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([table(ids[at]) for at, table in enumerate(self.tables)], 1)).squeeze(1)


def operations(widths: list[int], mode: str | None, *, ahead: bool) -> Counter[str]:
    """Returns those of the last step, with the dense part's."""
    shape = (len(widths), BATCH) if mode is None else (len(widths), BATCH, 3)
    batches = [torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(at)) for at in range(STEPS)]
    with sr.InProcessCluster(shards=2).connect(f"{len(widths)} {mode} {ahead}") as session:
        torch.manual_seed(0)
        model = session.distribute(Tables(widths, mode), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1).to(device())
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        made: Counter[str] = Counter()
        for ids in session.prefetch(batches, depth=2, device=device()) if ahead else batches:
            COUNTS.reset()
            model(ids).square().mean().backward()
            session.step(dense)
            made = Counter(COUNTS.operations)
        assert COUNTS.waits == 0, COUNTS.log
    return made


def dense_part(width: int) -> Counter[str]:
    """Returns the operations of the linear layer, the loss and the optimizer alone."""
    head, rows = nn.Linear(width, 1).to(device()), torch.randn(BATCH, width).to(device()).requires_grad_()
    dense = torch.optim.SGD(head.parameters(), lr=0.1)
    COUNTS.reset()
    head(rows).squeeze(1).square().mean().backward()
    dense.step()
    return Counter(COUNTS.operations)


@pytest.mark.parametrize("ahead", [True, False], ids=["prefetched", "pulled in the forward"])
@pytest.mark.parametrize("mode", [None, "sum", "mean"])
def test_operations_do_not_grow_with_the_tables_of_a_width(mode: str | None, ahead: bool) -> None:
    few = operations([4] * LEAST_TABLES, mode, ahead=ahead)
    many = operations([4] * MOST_TABLES, mode, ahead=ahead)
    assert few == many
    lookups = few - dense_part(4 * LEAST_TABLES)
    assert lookups.total() <= MOST, lookups


def test_rows_of_tables_with_padding_are_one_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding has no gradient; its rows are as those of any id."""
    gathers: list[int] = []
    gather = lookup_math.gather
    monkeypatch.setattr(lookup_math, "gather", lambda *given: gathers.append(1) or gather(*given))
    with sr.InProcessCluster().connect("padding") as session:
        model = session.distribute(
            Tables([4] * LEAST_TABLES, None, padding=0), optimizer=sr.optim.SGD(lr=0.1), min_rows=1
        ).to(device())
        for _ in range(STEPS):
            gathers.clear()
            model(torch.randint(0, ROWS, (LEAST_TABLES, BATCH)).to(device())).square().mean().backward()
            session.step()
    assert len(gathers) == 1


@pytest.mark.parametrize("mode", [None, "sum"])
def test_three_widths_cost_three_times_the_operations_at_most(mode: str | None) -> None:
    one, three = (operations(widths, mode, ahead=True) for widths in ([4] * 6, [4, 8, 16] * 8))
    dense = dense_part(24).total()
    assert three.total() - dense <= 3 * (one.total() - dense)


class OfKind(nn.Module):
    """Tables whose lookups are of one kind, behind one linear layer."""

    def __init__(self, kind: str, tables: int) -> None:
        super().__init__()
        self.kind = kind
        mode = "max" if "max" in kind else "mean" if "mean" in kind else "sum"
        padding = 0 if "padding" in kind else None
        self.tables = nn.ModuleList(
            nn.Embedding(ROWS, 4, padding_idx=padding)
            if "rows" in kind
            else nn.EmbeddingBag(ROWS, 4, mode=mode, padding_idx=padding, include_last_offset="to the end" in kind)
            for _ in range(tables)
        )
        self.head = nn.Linear(4 * tables, 1)

    def forward(self, ids: Tensor, flat: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        """Of ids (tables, BATCH, 3), the same as (tables, 3 * BATCH), offsets by table, and weights of the flat ids."""
        outs = []
        for at, table in enumerate(self.tables):
            if "weights" in self.kind:
                outs.append(table(flat[at], offsets[at], weights[at]))
            elif "offsets" in self.kind:
                outs.append(table(flat[at], offsets[at]))
            elif "rows" in self.kind:
                outs.append(table(ids[at]).sum(1))
            else:
                outs.append(table(ids[at]))
        return self.head(torch.cat(outs, 1)).squeeze(1)


def of_kind(kind: str, tables: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Returns a batch."""
    ids = torch.randint(0, ROWS, (tables, BATCH, 3), generator=generator)
    cuts = torch.sort(torch.randint(0, 3 * BATCH, (tables, BATCH - 1), generator=generator), dim=1).values
    offsets = [torch.zeros(tables, 1, dtype=torch.int64), cuts]
    if "to the end" in kind:
        offsets.append(torch.full((tables, 1), 3 * BATCH))
    return ids, ids.view(tables, -1), torch.cat(offsets, 1), torch.rand(tables, 3 * BATCH, generator=generator)


def operations_of_kind(kind: str, tables: int) -> Counter[str]:
    """Returns those of the last step of the lookups alone, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    with sr.InProcessCluster(shards=2).connect(f"kind {tables}") as session:
        model = session.distribute(OfKind(kind, tables), optimizer=sr.optim.SGD(lr=0.1), min_rows=1).to(device())
        found: Counter[str] = Counter()
        batches = [of_kind(kind, tables, generator) for _ in range(STEPS)]
        for batch in session.prefetch(batches, depth=1, device=device()):
            COUNTS.reset()
            found = Counter()
            with pytest.MonkeyPatch.context() as patch:
                for name in ("gather_all", "stage_all"):
                    patch.setattr(device_ops, name, counted_alone(getattr(device_ops, name), found))
                model(*batch).square().mean().backward()
            assert COUNTS.waits == 0, COUNTS.log
            session.step()
    return found


def counted_alone(call: Callable[..., Any], found: Counter[str]) -> Callable[..., Any]:
    """Returns a call that adds its operations to ``found``."""

    def counted(*given: Any) -> Any:
        before = Counter(COUNTS.operations)
        made = call(*given)
        found.update(Counter(COUNTS.operations) - before)
        return made

    return counted


KINDS = {
    "offsets": 30,
    "offsets, mean": 37,
    "offsets to the end": 30,
    "offsets, weights": 32,
    "padding": 20,
    "mean, padding": 30,
    "rows, padding": 9,
    "max": 40,
    "max, padding, offsets": 54,
}


@pytest.mark.parametrize(("kind", "most"), KINDS.items(), ids=KINDS)
def test_lookups_of_a_kind_are_made_together(kind: str, most: int) -> None:
    """One group of operations serves those of a width, whatever their bags, weights and padding."""
    few, many = operations_of_kind(kind, 3), operations_of_kind(kind, LEAST_TABLES)
    assert few == many
    assert many.total() <= most, many


def operations_there(tables: int, mode: str | None) -> tuple[Counter[str], int]:
    """Returns the operations, and the waits with those of copies to the host, of the last step of tables there."""
    shape = (tables, BATCH) if mode is None else (tables, BATCH, 3)
    made, waits = Counter[str](), 0
    with sr.InProcessCluster().connect(f"there {tables} {mode}") as session:
        model = session.distribute(
            Tables([4] * tables, mode).to(device()),
            optimizer=sr.optim.Adagrad(lr=0.1),
            min_rows=1,
            tables={"*": sr.Table(placement="device")},
        )
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            ids = torch.randint(0, ROWS, shape).to(device())
            COUNTS.reset()
            model(ids).square().mean().backward()
            session.step(dense)
            made, waits = Counter(COUNTS.operations), COUNTS.waits + COUNTS.to_host
    return made, waits


@pytest.mark.parametrize("mode", [None, "sum", "mean"])
def test_operations_of_tables_on_a_device_do_not_grow_with_the_tables(mode: str | None) -> None:
    """Tables of one width and optimizer are one matrix: one search for keys, one operation a direction, one update.

    The host waits for the search, for what it found, and for the verdict over all gradients, the dense ones included.
    """
    (few, waits), (many, more_waits) = (operations_there(tables, mode) for tables in (LEAST_TABLES, MOST_TABLES))
    assert few == many
    assert waits == more_waits == WAITS_THERE
    lookups = few - dense_part(4 * LEAST_TABLES)
    assert lookups.total() <= MOST_THERE, lookups


def there(kind: str, tables: int) -> tuple[sr.Session, nn.Module]:
    """Returns a session in a cluster of this process, and a model of tables on the device."""
    session = sr.InProcessCluster().connect(f"there {kind} {tables}")
    torch.manual_seed(0)
    model = Tables([4] * tables, None, padding=0) if kind == "rows, padding" else OfKind(kind, tables)
    placed = {"*": sr.Table(placement="device")}
    return session, session.distribute(
        model.to(device()), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1, tables=placed
    )


def given_there(kind: str, tables: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Returns a batch of which offsets alone stay on the host, where they are checked."""
    if kind == "rows, padding":
        return (torch.randint(0, ROWS, (tables, BATCH), generator=generator).to(device()),)
    ids, flat, offsets, weights = of_kind(kind, tables, generator)
    return ids.to(device()), flat.to(device()), offsets, weights.to(device())


KINDS_THERE = [*(kind for kind in KINDS if "max" not in kind and "rows" not in kind), "rows, padding"]


@pytest.mark.parametrize("kind", KINDS_THERE)
def test_lookups_of_a_kind_of_tables_on_a_device_are_made_together(kind: str) -> None:
    """Offsets, weights and padding ids do not make a table's operations and waits its own."""
    found = []
    for tables in (LEAST_TABLES, MOST_TABLES):
        session, model = there(kind, tables)
        with session:
            generator = torch.Generator().manual_seed(0)
            for _ in range(STEPS):
                batch = given_there(kind, tables, generator)
                COUNTS.reset()
                model(*batch).square().mean().backward()
                session.step()
                made = Counter(COUNTS.operations), COUNTS.waits + COUNTS.to_host, COUNTS.to_device
        found.append(made)
    assert found[0] == found[1]
    assert found[0][0].total() <= MOST_THERE + MOST, found[0]


@pytest.mark.parametrize("kind", KINDS_THERE)
def test_lookups_made_together_there_have_the_bits_of_each_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(device_maker, "with_outputs", lambda calls: [call.read for call in calls])
        session, model = there(kind, 4)
        with session:
            generator, outs = torch.Generator().manual_seed(0), []
            for step in range(6):
                batch = given_there(kind, 4, generator)
                if step == 3:  # all ids of one table are its padding id, where it has one
                    batch = (batch[0].index_fill(0, torch.tensor([1]).to(device()), 0), *batch[1:])
                loss = model(*batch).square().mean()
                if step == 4:  # two backwards of one forward
                    loss.backward(retain_graph=True)
                loss.backward()
                outs.append(loss.detach().cpu())
                session.step()
            rows = [whole_rows(session.core.device_tables, f"tables.{at}") for at in range(4)]
        ends.append(outs + rows)
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


class Twice(nn.Module):
    """Lookups of one table with others of another kind between them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.bag = nn.Embedding(ROWS, 4), nn.EmbeddingBag(ROWS, 4, mode="mean")
        self.other = nn.EmbeddingBag(ROWS, 4, mode="mean")

    def forward(self, ids: Tensor) -> Tensor:
        first = [self.other(ids[:, :2]), self.bag(ids), self.rows(ids[:, 0])]
        parts = [*first, self.bag(ids[:, 1:]), self.rows(ids[:, 1])]
        return torch.cat(parts, 1).square().sum()


def trained(namespace: str) -> list[Tensor]:
    """Returns the rows of its tables after some steps."""
    with sr.InProcessCluster(shards=2).connect(namespace) as session:
        torch.manual_seed(0)
        model = session.distribute(Twice(), optimizer=sr.optim.SGD(lr=0.01), min_rows=1, carry_weights=True)
        model = model.to(device())
        for seed in range(4):
            ids = torch.randint(0, 9, (16, 3), generator=torch.Generator().manual_seed(seed))
            model(ids).backward()
            session.step()
        return [torch.from_numpy(session.table(name).pull(range(ROWS))) for name in ("rows", "bag", "other")]


def test_gradients_of_a_row_are_added_in_the_order_of_the_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups of several kinds that share tables have the bits that each of them alone would give."""
    together = trained("together")
    monkeypatch.setattr(
        device_ops, "groups_of", lambda lookups, numbers: [device_groups.LookupGroup(lookups, [i]) for i in numbers]
    )
    for rows, wanted in zip(together, trained("alone"), strict=True):
        assert torch.equal(rows, wanted)
