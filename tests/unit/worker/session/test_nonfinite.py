"""Gradients of the dense side are judged exactly: NaN and Inf are found, and large finite values are allowed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from sparserow.worker.session.dense_optimizer import has_nonfinite

SIZES = ((3, 5), (7,), ())


def optimizer_with(grads: list[Tensor | None]) -> torch.optim.Optimizer:
    parameters = []
    for size, grad in zip(SIZES, grads, strict=True):
        parameters.append(nn.Parameter(torch.zeros(size, dtype=torch.float32 if grad is None else grad.dtype)))
        parameters[-1].grad = grad
    return torch.optim.SGD(parameters, lr=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_each_bad_value_at_each_place_is_found(dtype: torch.dtype) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        for size, wanted in enumerate(SIZES):
            for place in range(math.prod(wanted)):
                grads = [torch.ones(each, dtype=dtype) for each in SIZES]
                assert not has_nonfinite(optimizer_with(grads))
                grads[size].view(-1)[place] = bad
                assert has_nonfinite(optimizer_with(grads)), (bad, size, place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_whose_squares_overflow_are_finite(dtype: torch.dtype) -> None:
    grads = [torch.full(size, torch.finfo(dtype).max, dtype=dtype) for size in SIZES]
    assert not has_nonfinite(optimizer_with(grads))
    grads[1][3] = math.nan
    assert has_nonfinite(optimizer_with(grads))


def test_sparse_missing_and_empty_gradients() -> None:
    assert not has_nonfinite(optimizer_with([None, None, None]))
    values = [[1.0] * 5, [math.inf] * 5]
    sparse = torch.sparse_coo_tensor([[2, 2]], values, (3, 5), check_invariants=True)
    assert has_nonfinite(optimizer_with([sparse, None, None]))
    assert not has_nonfinite(optimizer_with([torch.zeros(3, 5).to_sparse(), None, torch.tensor(1.0)]))


def test_gradients_that_are_not_contiguous_are_judged_by_their_own_values() -> None:
    around = torch.full((5, 3), math.nan)
    around[:, 0] = 1.0
    one = nn.Parameter(torch.zeros(5))
    one.grad = around[:, 0]
    assert not has_nonfinite(torch.optim.SGD([one], lr=1.0))
    around[4, 0] = math.inf
    assert has_nonfinite(torch.optim.SGD([one], lr=1.0))
