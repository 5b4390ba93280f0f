"""Row optimizers by torch's operations: float32 on the device gives what float64 on the host gives, to 1e-6."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

PLAIN = {"weight_decay": 1e-3, "decoupled": False}
DECOUPLED = {"weight_decay": 1e-3, "decoupled": True}
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
RMSPROP = {"alpha": 0.9, "eps": 1e-8}
CASES = {
    "sgd": ("sgd", 8, {"momentum": 0.9, "dampening": 0.1, "nesterov": False, **PLAIN}),
    "sgd-decoupled": ("sgd", 0, {"momentum": 0.0, "dampening": 0.0, "nesterov": False, **DECOUPLED}),
    "adagrad": ("adagrad", 8, {"eps": 1e-10, "accumulator_decay": 1.0, **PLAIN}),
    "rowwise_adagrad": ("rowwise_adagrad", 1, {"eps": 1e-10, "accumulator_decay": 0.9, **DECOUPLED}),
    "adam": ("adam", 16, {**ADAM, "amsgrad": False, **PLAIN}),
    "amsgrad": ("adam", 24, {**ADAM, "amsgrad": True, **DECOUPLED}),
    "rmsprop": ("rmsprop", 8, {**RMSPROP, "momentum": 0.0, "centered": False, **PLAIN}),
    "rmsprop-full": ("rmsprop", 24, {**RMSPROP, "momentum": 0.9, "centered": True, **DECOUPLED}),
    "adadelta": ("adadelta", 16, {"rho": 0.9, "eps": 1e-3, **PLAIN}),
    "lion": ("lion", 8, {"beta1": 0.9, "beta2": 0.99, **DECOUPLED}),
    "lamb": ("lamb", 16, {**ADAM, **DECOUPLED}),
}


@pytest.fixture
def row_optimizers(lookup_math: ModuleType) -> ModuleType:
    return importlib.import_module(f"{lookup_math.__package__}.row_optimizers")


@pytest.mark.parametrize("case", sorted(CASES))
def test_an_update_on_the_device(row_optimizers: ModuleType, device: torch.device, case: str) -> None:
    draw = torch.Generator().manual_seed(5)
    kind, floats, parameters = CASES[case]
    here, there = ([torch.zeros(30, 8), torch.full((30, floats), 0.1 if "grad" in kind else 0.0)] for _ in range(2))
    for step in range(1, 7):
        grads = torch.randn(30, 8, generator=draw)
        counts = torch.full((30,), step, dtype=torch.int32)
        rows = row_optimizers.RowsToUpdate(here[0].double(), here[1].double(), counts, grads.double())
        here = [each.double() for each in row_optimizers.KERNELS[kind](rows, parameters, 0.05)]
        rows = row_optimizers.RowsToUpdate(
            there[0].to(device), there[1].to(device), counts.to(device), grads.to(device)
        )
        there = list(row_optimizers.KERNELS[kind](rows, parameters, 0.05))
    assert here[0].abs().max() > 0.01
    for mine, wanted in zip(there, here, strict=True):
        torch.testing.assert_close(mine.cpu().double(), wanted, rtol=1e-5, atol=1e-6)


def test_sums_of_ranks_and_their_limit(row_optimizers: ModuleType, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(6)
    blocks = [(torch.tensor([4, 1, 9]), torch.randn(3, 5, generator=draw)), (torch.tensor([1]), torch.ones(1, 5))]
    rows, sums = row_optimizers.sum_blocks([(keys.to(device), grads.to(device)) for keys, grads in blocks], 0.5)
    assert rows.tolist() == [1, 4, 9]
    torch.testing.assert_close(sums.cpu()[0], (blocks[0][1][1] + 1) / 2)
    grads = torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 1.0]], device=device)
    shortened, is_long = row_optimizers.seal_rows(grads, 2.0, 5.0)
    is_bad = row_optimizers.is_nonfinite(shortened)
    assert (is_bad.tolist(), is_long.tolist()) == ([False, False, True], [True, False, False])
    torch.testing.assert_close(shortened[:2].cpu(), torch.tensor([[3.0, 4.0], [0.6, 0.8]]))
