"""Row optimizers by torch's operations, for rows that a device keeps: the formulas of ``cpp_ext/optim``.

A row without a gradient does not move, and bias correction uses the row's own update count. Sums of several ranks are
taken in float64, as on a shard. Needs torch alone. To add an optimizer: its function here, and its name in ``KERNELS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowsToUpdate:
    """Rows of one table, before their update.

    Attributes:
        weights: (n, dim) float32.
        state: (n, floats of state) float32.
        counts: (n) int32: the number of updates of each row, this one included.
        grads: (n, dim) float32.
    """

    weights: Tensor
    state: Tensor
    counts: Tensor
    grads: Tensor


# Gives the weights and the state after the update, from the rows, the parameters of the optimizer by name, and the
# learning rate; what it is given stays as it is.
Kernel: TypeAlias = Callable[[RowsToUpdate, Mapping[str, Any], float], tuple[Tensor, Tensor]]


def _sgd(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    grads = rows.grads + p["weight_decay"] * rows.weights
    if p["momentum"] == 0:
        return rows.weights - lr * grads, rows.state
    is_first = (rows.counts == 1).unsqueeze(1)
    moved = torch.where(is_first, grads, p["momentum"] * rows.state + (1.0 - p["dampening"]) * grads)
    ahead = grads + p["momentum"] * moved if p["nesterov"] else moved
    return rows.weights - lr * ahead, moved


def _adagrad(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    grads = rows.grads + p["weight_decay"] * rows.weights
    sums = rows.state + grads * grads
    return rows.weights - lr * (grads / (sums.sqrt() + p["eps"])), sums


def _rowwise_adagrad(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    grads = rows.grads + p["weight_decay"] * rows.weights
    sums = rows.state + (grads * grads).mean(1, keepdim=True)
    return rows.weights - lr * (grads / (sums.sqrt() + p["eps"])), sums


def _adam(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    dim = rows.weights.shape[1]
    grads = rows.grads + p["weight_decay"] * rows.weights
    times = rows.counts.to(torch.float64).unsqueeze(1)
    step, root = (lr / (1.0 - p["beta1"] ** times)).float(), (1.0 - p["beta2"] ** times).sqrt().float()
    first = rows.state[:, :dim] + (grads - rows.state[:, :dim]) * (1.0 - p["beta1"])
    second = p["beta2"] * rows.state[:, dim:] + (1.0 - p["beta2"]) * (grads * grads)
    moved = rows.weights - step * (first / (second.sqrt() / root + p["eps"]))
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
