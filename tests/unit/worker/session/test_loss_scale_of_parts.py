"""Gradients of which a rank has some in parts and some whole: they are unscaled as torch unscales whole ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sparserow.worker.session.loss_scale import LossScale, unscale


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(bad: float, *, in_parts: bool) -> tuple[nn.Module, torch.optim.Optimizer, GradScaler]:
    """A tower after a scaled backward; in parts its last layer is whole all the same."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Linear(4, 1))
    if in_parts:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=256.0)
    scaler.scale(model(torch.full((2, 4), bad)).sum()).backward()
    return model, dense, scaler


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads if g is not None]


def test_parts_and_whole_gradients_are_unscaled_together(alone: None) -> None:
    whole, dense, scaler = trained(0.5, in_parts=False)
    unscale(scaler, dense)
    parts, dense_of_parts, scaler_of_parts = trained(0.5, in_parts=True)
    kinds = {hasattr(p.grad, "to_local") for p in parts.parameters()}
    assert kinds == {True, False}
    unscale(scaler_of_parts, dense_of_parts)
    for mine, other in zip(grads_of(parts), grads_of(whole), strict=True):
        torch.testing.assert_close(mine, other)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler_of_parts.unscale_(dense_of_parts)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1.0])
def test_an_infinity_in_a_part_is_found(alone: None, bad: float) -> None:
    _, dense, scaler = trained(bad, in_parts=True)
    assert LossScale(scaler).unscale(dense) == (not math.isfinite(bad))
