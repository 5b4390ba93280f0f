"""The row optimizers of the local backend against ``torch.optim`` on each row alone, and against the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import sparserow as sr
from sparserow.proto.optim import RowOptimizer
from sparserow.worker.training.local_row_optimizer import LocalRowOptimizer

ROWS, DIM, STEPS, LR, SEED = 6, 3, 200, 0.03, 5
Make = Callable[[list[torch.Tensor]], optim.Optimizer]
PAIRS: dict[str, tuple[RowOptimizer, Make]] = {
    "momentum": (sr.optim.SGD(LR, momentum=0.9), lambda rows: optim.SGD(rows, LR, momentum=0.9)),
    "dampening": (
        sr.optim.SGD(LR, momentum=0.9, dampening=0.3),
        lambda rows: optim.SGD(rows, LR, momentum=0.9, dampening=0.3),
    ),
    "nesterov": (
        sr.optim.SGD(LR, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda rows: optim.SGD(rows, LR, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adagrad": (
        sr.optim.Adagrad(LR, initial_accumulator=0.1, weight_decay=0.1),
        lambda rows: optim.Adagrad(rows, LR, initial_accumulator_value=0.1, weight_decay=0.1),
    ),
    "adam": (sr.optim.Adam(LR), lambda rows: optim.Adam(rows, LR)),
    "adamw": (sr.optim.AdamW(LR), lambda rows: optim.AdamW(rows, LR)),
    "amsgrad": (sr.optim.Adam(LR, amsgrad=True), lambda rows: optim.Adam(rows, LR, amsgrad=True)),
    "rmsprop": (
        sr.optim.RMSprop(LR, momentum=0.5, centered=True),
        lambda rows: optim.RMSprop(rows, LR, momentum=0.5, centered=True),
    ),
    "adadelta": (sr.optim.Adadelta(LR), lambda rows: optim.Adadelta(rows, LR)),
}


def draws() -> list[tuple[list[int], torch.Tensor]]:
    """For each step the rows that have a gradient, some of them twice, and the gradients."""
    made = torch.Generator().manual_seed(SEED)
    steps = []
    for _ in range(STEPS):
        rows = torch.randint(0, ROWS, (3,), generator=made).tolist()
        steps.append((rows, torch.randn(len(rows), DIM, generator=made)))
    return steps


def first_rows() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(SEED + 1))


def moved(optimizer: RowOptimizer) -> torch.Tensor:
    """The rows after all steps."""
    weight = nn.Parameter(first_rows())
    local = LocalRowOptimizer([weight], optimizer)
    for rows, grads in draws():
        weight.grad = torch.sparse_coo_tensor(torch.tensor([rows]), grads, weight.shape, check_invariants=True)
        local.step()
    return weight.detach()


@pytest.mark.parametrize("name", PAIRS)
def test_each_row_moves_as_torch_moves_it_alone(name: str) -> None:
    ours, make = PAIRS[name]
    alone = [nn.Parameter(row.clone()) for row in first_rows()]
    others = [make([row]) for row in alone]
    for rows, grads in draws():
        for row in set(rows):
            alone[row].grad = grads[[at for at, each in enumerate(rows) if each == row]].sum(dim=0)
            others[row].step()
    print(f"seed {SEED}")
    torch.testing.assert_close(moved(ours), torch.stack([row.detach() for row in alone]), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "optimizer",
    [
        *(ours for ours, _ in PAIRS.values()),
        sr.optim.RowWiseAdagrad(LR),
        sr.optim.Lion(LR),
        sr.optim.LAMB(LR, weight_decay=0.1),
    ],
    ids=repr,
)
def test_rows_on_servers_move_alike(optimizer: RowOptimizer) -> None:
    with sr.InProcessCluster(shards=2).connect() as session:
        table: Any = session.create_table("t", dim=DIM, optimizer=optimizer, init=sr.Constant(0.0))
        table.assign(np.arange(ROWS), first_rows().numpy())
        for rows, grads in draws():
            keys, inverse = np.unique(rows, return_inverse=True)
            sums = np.zeros((len(keys), DIM), np.float32)
            np.add.at(sums, inverse, grads.numpy())
            table.push(keys.astype(np.uint64), sums, lr=LR)
        served = torch.from_numpy(table.pull(np.arange(ROWS)))
    torch.testing.assert_close(moved(optimizer), served, rtol=2e-4, atol=2e-5)


def test_a_row_without_a_gradient_does_not_move() -> None:
    weight = nn.Parameter(first_rows())
    local = LocalRowOptimizer([weight], sr.optim.AdamW(LR))
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.ones(1, DIM), weight.shape)
    local.step()
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[4]]), torch.ones(1, DIM), weight.shape)
    before = weight.detach().clone()
    local.step()
    changed = (weight.detach() != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [4]
    weight.grad = None
    local.step()
