"""Row optimizers by torch's operations, for rows that a device keeps: the formulas of ``cpp_ext/optim``.

A row without a gradient does not move, and bias correction uses the row's own update count. Sums of several ranks are
taken in float64, as on a shard. Needs torch alone. To add an optimizer: its function here, and its name in ``KERNELS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

# (weights (n, dim), state (n, floats of state), update counts (n) with this update, gradients (n, dim), parameters, lr)
# -> (weights, state) after the update; what it is given stays as it is.
Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Mapping[str, Any], float], tuple[Tensor, Tensor]]


def _sgd(
    weights: Tensor, state: Tensor, counts: Tensor, grads: Tensor, p: Mapping[str, Any], lr: float
) -> tuple[Tensor, Tensor]:
    grads = grads + p["weight_decay"] * weights
    if p["momentum"] == 0:
        return weights - lr * grads, state
    is_first = (counts == 1).unsqueeze(1)
    moved = torch.where(is_first, grads, p["momentum"] * state + (1.0 - p["dampening"]) * grads)
    ahead = grads + p["momentum"] * moved if p["nesterov"] else moved
    return weights - lr * ahead, moved


def _adagrad(
    weights: Tensor, state: Tensor, counts: Tensor, grads: Tensor, p: Mapping[str, Any], lr: float
) -> tuple[Tensor, Tensor]:
    grads = grads + p["weight_decay"] * weights
    sums = state + grads * grads
    return weights - lr * (grads / (sums.sqrt() + p["eps"])), sums


def _rowwise_adagrad(
    weights: Tensor, state: Tensor, counts: Tensor, grads: Tensor, p: Mapping[str, Any], lr: float
) -> tuple[Tensor, Tensor]:
    grads = grads + p["weight_decay"] * weights
    sums = state + (grads * grads).mean(1, keepdim=True)
    return weights - lr * (grads / (sums.sqrt() + p["eps"])), sums


def _adam(
    weights: Tensor, state: Tensor, counts: Tensor, grads: Tensor, p: Mapping[str, Any], lr: float
) -> tuple[Tensor, Tensor]:
    dim = weights.shape[1]
    grads = grads + p["weight_decay"] * weights
    times = counts.to(torch.float64).unsqueeze(1)
    correction1, correction2 = 1.0 - p["beta1"] ** times, 1.0 - p["beta2"] ** times
    step, root = (lr / correction1).float(), correction2.sqrt().float()
    first = state[:, :dim] + (grads - state[:, :dim]) * (1.0 - p["beta1"])
    second = p["beta2"] * state[:, dim:] + (1.0 - p["beta2"]) * (grads * grads)
    moved = weights - step * (first / (second.sqrt() / root + p["eps"]))
    return moved, torch.cat([first, second], dim=1)


KERNELS: Mapping[str, Kernel] = MappingProxyType({
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
})  # fmt: skip


def sum_blocks(blocks: Sequence[tuple[Tensor, Tensor]], scale: float) -> tuple[Tensor, Tensor]:
    """Sums the gradients of several ranks by row, times ``scale``.

    Args:
        blocks: of each rank in rank order: rows, (n) int64, unique within the block, and gradients, (n, dim) float32.
        scale: the factor of every gradient.

    Returns:
        The rows, (u) int64, and their sums, (u, dim) float32.
    """
    rows, inverse = torch.unique(torch.cat([rows for rows, _ in blocks]), return_inverse=True)
    grads = torch.cat([grads for _, grads in blocks]).to(torch.float64) * scale
    sums = torch.zeros(rows.shape[0], grads.shape[1], dtype=torch.float64, device=grads.device)
    return rows, sums.index_add_(0, inverse, grads).float()


def seal_rows(grads: Tensor, scale: float, clip_row_norm: float) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies gradients by ``scale`` and shortens rows to an L2 norm of ``clip_row_norm``.

    Args:
        grads: (n, dim) float32.
        scale: the factor of every gradient.
        clip_row_norm: the limit; infinity: none.

    Returns:
        The gradients, (n, dim) float32; (n) bool: whether a row has NaN or Inf; (n) bool: whether it was shortened.
    """
    grads = grads * scale
    is_bad = ~torch.isfinite(grads).all(dim=1)
    norms = grads.to(torch.float64).square().sum(dim=1).sqrt()
    is_long = (norms > clip_row_norm) & ~is_bad
    shrink = torch.where(is_long, clip_row_norm / norms, 1.0).unsqueeze(1) if clip_row_norm < float("inf") else None
    shortened = grads if shrink is None else (grads.to(torch.float64) * shrink).float()
    return shortened, is_bad, is_long
