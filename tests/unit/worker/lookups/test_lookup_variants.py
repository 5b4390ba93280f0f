"""Every variant of Embedding and EmbeddingBag trains as torch's own, from the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr

ROWS, DIM, STEPS = 40, 5, 50


@dataclass(frozen=True)
class Variant:
    name: str
    layer: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    weights: bool = False


def ids_2d(generator: torch.Generator, dtype: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
    return (torch.randint(0, ROWS, (16, 6), generator=generator).to(dtype),)


def ids_offsets(generator: torch.Generator) -> tuple[Tensor, ...]:
    cuts = torch.sort(torch.randint(0, 60, (15,), generator=generator)).values
    cuts[4] = cuts[5]  # at least one empty bag
    return torch.randint(0, ROWS, (60,), generator=generator), torch.cat([torch.zeros(1, dtype=torch.int64), cuts])


def ids_last_offset(generator: torch.Generator) -> tuple[Tensor, ...]:
    ids, offsets = ids_offsets(generator)
    return ids, torch.cat([offsets, torch.tensor([60])])


def bag(**options: object) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(ROWS, DIM, **options)  # type: ignore[arg-type]


VARIANTS = [
    Variant("embedding", lambda: nn.Embedding(ROWS, DIM), ids_2d),
    Variant("embedding_int32", lambda: nn.Embedding(ROWS, DIM), lambda g: ids_2d(g, torch.int32)),
    Variant("embedding_padding", lambda: nn.Embedding(ROWS, DIM, padding_idx=3), ids_2d),
    Variant("embedding_negative_padding", lambda: nn.Embedding(ROWS, DIM, padding_idx=-1), ids_2d),
    Variant("embedding_sparse", lambda: nn.Embedding(ROWS, DIM, sparse=True), ids_2d),
    Variant("bag_sum", bag(mode="sum"), ids_2d),
    Variant("bag_mean", bag(mode="mean"), ids_2d),
    Variant("bag_max", bag(mode="max"), ids_2d),
    Variant("bag_sum_offsets", bag(mode="sum"), ids_offsets),
    Variant("bag_mean_offsets", bag(mode="mean"), ids_offsets),
    Variant("bag_max_offsets", bag(mode="max"), ids_offsets),
    Variant("bag_last_offset", bag(mode="mean", include_last_offset=True), ids_last_offset),
    Variant("bag_padding_sum", bag(mode="sum", padding_idx=3), ids_offsets),
    Variant("bag_padding_mean", bag(mode="mean", padding_idx=3), ids_2d),
    Variant("bag_padding_max", bag(mode="max", padding_idx=3), ids_offsets),
    Variant("bag_weights", bag(mode="sum"), ids_2d, weights=True),
    Variant("bag_weights_offsets", bag(mode="sum", padding_idx=3), ids_offsets, weights=True),
]
OPTIMIZERS = [sr.optim.SGD(lr=0.1), sr.optim.Adagrad(lr=0.1), sr.optim.Adam(lr=0.01)]


class Net(nn.Module):
    """A lookup, its per-sample weights when it has any, and a dense layer behind it."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.table = variant.layer()
        self.scale = nn.Parameter(torch.ones(ROWS)) if variant.weights else None
        self.head = nn.Linear(DIM, 1)

    def forward(self, *batch: Tensor) -> Tensor:
        if self.scale is None:
            return self.head(torch.tanh(self.table(*batch)))
        return self.head(torch.tanh(self.table(*batch, per_sample_weights=self.scale[batch[0]])))


class RowOptimizer:
    """torch's optimizer on each touched row alone: what *lazy* means."""

    def __init__(self, weight: nn.Parameter, optimizer: object) -> None:
        self.weight = weight
        self.rows = [nn.Parameter(row.detach().clone()) for row in weight]
        make = {sr.optim.SGD: torch.optim.SGD, sr.optim.Adagrad: torch.optim.Adagrad, sr.optim.Adam: torch.optim.Adam}[
            type(optimizer)
        ]
        self.optimizers = [make([row], lr=optimizer.lr) for row in self.rows]  # type: ignore[attr-defined]

    def step(self, touched: set[int]) -> None:
        grad = self.weight.grad
        assert grad is not None
        grad = grad.to_dense() if grad.is_sparse else grad
        for row in touched:
            self.rows[row].grad = grad[row].clone()
            self.optimizers[row].step()
            self.weight.data[row] = self.rows[row].data
        self.weight.grad = None


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=2).connect("variants") as session:
        yield session


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__.lower())
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variant_trains_as_torch(variant: Variant, optimizer: object, session: sr.Session) -> None:
    torch.manual_seed(7)
    ours = Net(variant)
    reference = copy.deepcopy(ours)
    row_optimizer = RowOptimizer(reference.table.weight, optimizer)
    dense_reference = torch.optim.SGD([p for n, p in reference.named_parameters() if n != "table.weight"], lr=0.05)
    session.distribute(ours, optimizer=optimizer, min_rows=1)
    dense = torch.optim.SGD(ours.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        batch = variant.batch(generator)
        expected, got = reference(*batch), ours(*batch)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        (expected**2).mean().backward()
        (got**2).mean().backward()
        dense_reference.step()
        dense_reference.zero_grad()
        row_optimizer.step(touched_rows(reference.table, batch[0]))
        session.step(dense)
    rows = session.table("table").pull(list(range(ROWS)))
    torch.testing.assert_close(torch.from_numpy(rows), reference.table.weight.detach(), rtol=1e-6, atol=1e-6)
    for (name, mine), (_, theirs) in zip(dense_names(ours), dense_names(reference), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, msg=name)
    ours.eval()
    reference.eval()
    batch = variant.batch(generator)
    torch.testing.assert_close(ours(*batch), reference(*batch), rtol=1e-6, atol=1e-6)


def touched_rows(layer: nn.Module, ids: Tensor) -> set[int]:
    """Rows that a step moves: those looked up, but for padding, and with max those that gave a maximum."""
    rows = {int(i) for i in ids.flatten()} - {layer.padding_idx}
    if getattr(layer, "mode", "") == "max":
        rows &= {int(i) for i in layer.weight.grad.abs().sum(1).nonzero()}
    return rows


def dense_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, parameter) for name, parameter in model.named_parameters() if name not in ("table.weight", "table.rows")
    ]


class Weighted(nn.Module):
    """Bags whose offsets and weights are parts of the batch; ``use`` gives the weights to the layers."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bags, self.use = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(3)), use

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        rows = [bag(ids[at], offsets[at], self.use(weights[at])) for at, bag in enumerate(self.bags)]
        return torch.stack(rows).square().sum()


@pytest.mark.parametrize("use", [lambda weights: weights, Tensor.detach], ids=["as they are", "detached"])
@pytest.mark.parametrize("has_gradient", [False, True], ids=["without gradient", "with gradient"])
def test_weights_of_the_batch_have_the_gradient_of_the_layer(
    session: sr.Session, use: Callable[[Tensor], Tensor], has_gradient: bool
) -> None:
    """Lookups that are made together before the forward take what the batch has, and not what the model made of it."""
    torch.manual_seed(0)
    local = Weighted(use)
    model = session.distribute(copy.deepcopy(local), optimizer=sr.optim.SGD(lr=0.0), min_rows=1, carry_weights=True)
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        ids, offsets = torch.randint(0, ROWS, (3, 12), generator=draw), torch.tensor([[0, 3, 9]] * 3)
        given = [torch.rand(3, 12, generator=torch.Generator().manual_seed(seed)) for _ in range(2)]
        for weights in given:
            weights.requires_grad_(has_gradient)
        outs = [each(ids, offsets, weights) for each, weights in zip((local, model), given, strict=True)]
        torch.testing.assert_close(outs[1], outs[0])
        for out in outs:
            out.backward()
        session.step()
        assert (given[1].grad is None) is (given[0].grad is None)
        if given[0].grad is not None:
            torch.testing.assert_close(given[1].grad, given[0].grad)
