"""Row optimizers by torch's operations: float32 on the device gives what float64 on the host gives, to 1e-6."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

PARAMETERS = {
    "sgd": {"momentum": 0.9, "dampening": 0.1, "nesterov": False, "weight_decay": 1e-3},
    "adagrad": {"eps": 1e-10, "initial_accumulator": 0.1, "weight_decay": 1e-3},
    "rowwise_adagrad": {"eps": 1e-10, "initial_accumulator": 0.1, "weight_decay": 0.0},
    "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-3},
}
FLOATS = {"sgd": 8, "adagrad": 8, "rowwise_adagrad": 1, "adam": 16}


@pytest.fixture
def row_optimizers(lookup_math: ModuleType) -> ModuleType:
    return importlib.import_module(f"{lookup_math.__package__}.row_optimizers")


@pytest.mark.parametrize("kind", sorted(PARAMETERS))
def test_an_update_on_the_device(row_optimizers: ModuleType, device: torch.device, kind: str) -> None:
    draw = torch.Generator().manual_seed(5)
    here, there = (
        [torch.zeros(30, 8), torch.full((30, FLOATS[kind]), 0.1 if "grad" in kind else 0.0)] for _ in range(2)
    )
    for step in range(1, 7):
        grads = torch.randn(30, 8, generator=draw)
        counts = torch.full((30,), step, dtype=torch.int32)
        rows = row_optimizers.RowsToUpdate(here[0].double(), here[1].double(), counts, grads.double())
        here = [each.double() for each in row_optimizers.KERNELS[kind](rows, PARAMETERS[kind], 0.05)]
        rows = row_optimizers.RowsToUpdate(
            there[0].to(device), there[1].to(device), counts.to(device), grads.to(device)
        )
        there = list(row_optimizers.KERNELS[kind](rows, PARAMETERS[kind], 0.05))
    assert here[0].abs().max() > 0.05
    for mine, wanted in zip(there, here, strict=True):
        torch.testing.assert_close(mine.cpu().double(), wanted, rtol=1e-5, atol=1e-6)


def test_sums_of_ranks_and_their_limit(row_optimizers: ModuleType, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(6)
    blocks = [(torch.tensor([4, 1, 9]), torch.randn(3, 5, generator=draw)), (torch.tensor([1]), torch.ones(1, 5))]
    rows, sums = row_optimizers.sum_blocks([(keys.to(device), grads.to(device)) for keys, grads in blocks], 0.5)
    assert rows.tolist() == [1, 4, 9]
    torch.testing.assert_close(sums.cpu()[0], (blocks[0][1][1] + 1) / 2)
    grads = torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 1.0]], device=device)
    shortened, is_bad, is_long = row_optimizers.seal_rows(grads, 2.0, 5.0)
    assert (is_bad.tolist(), is_long.tolist()) == ([False, False, True], [True, False, False])
    torch.testing.assert_close(shortened[:2].cpu(), torch.tensor([[3.0, 4.0], [0.6, 0.8]]))
