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


def _decayed(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients and the weights after weight decay."""
    if p["weight_decay"] == 0:
        return rows.grads, rows.weights
    if p["decoupled"]:
        return rows.grads, rows.weights * (1.0 - lr * p["weight_decay"])
    return rows.grads + p["weight_decay"] * rows.weights, rows.weights


def _corrections(rows: RowsToUpdate, p: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns Adam's corrections of both moments by the counts of the rows, (n, 1) float64."""
    times = rows.counts.to(torch.float64).unsqueeze(1)
    return 1.0 - p["beta1"] ** times, 1.0 - p["beta2"] ** times


def _moments(rows: RowsToUpdate, grads: Tensor, p: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    dim = rows.weights.shape[1]
    first, second = rows.state[:, :dim], rows.state[:, dim : 2 * dim]
    return first + (grads - first) * (1.0 - p["beta1"]), p["beta2"] * second + (1.0 - p["beta2"]) * (grads * grads)


def _sgd(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    grads, weights = _decayed(rows, p, lr)
    if p["momentum"] == 0:
        return weights - lr * grads, rows.state
    is_first = (rows.counts == 1).unsqueeze(1)
    moved = torch.where(is_first, grads, p["momentum"] * rows.state + (1.0 - p["dampening"]) * grads)
    ahead = grads + p["momentum"] * moved if p["nesterov"] else moved
    return weights - lr * ahead, moved


def _kept(rows: RowsToUpdate, p: Mapping[str, Any]) -> Tensor:
    """Returns what is left of Adagrad's sums."""
    return rows.state if p["accumulator_decay"] == 1 else p["accumulator_decay"] * rows.state


def _adagrad(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    grads, weights = _decayed(rows, p, lr)
    sums = _kept(rows, p) + grads * grads
    return weights - lr * (grads / (sums.sqrt() + p["eps"])), sums


def _rowwise_adagrad(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    grads, weights = _decayed(rows, p, lr)
    sums = _kept(rows, p) + (grads * grads).mean(1, keepdim=True)
    return weights - lr * (grads / (sums.sqrt() + p["eps"])), sums


def _adam(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    grads, weights = _decayed(rows, p, lr)
    correction1, correction2 = _corrections(rows, p)
    step, root = (lr / correction1).float(), correction2.sqrt().float()
    first, second = _moments(rows, grads, p)
    state = [first, second]
    if p["amsgrad"]:
        state.append(torch.maximum(rows.state[:, 2 * weights.shape[1] :], second))
    return weights - step * (first / (state[-1].sqrt() / root + p["eps"])), torch.cat(state, dim=1)


def _rmsprop(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    grads, weights = _decayed(rows, p, lr)
    arrays = list(rows.state.split(weights.shape[1], dim=1))
    square = p["alpha"] * arrays.pop(0) + (1.0 - p["alpha"]) * (grads * grads)
    state, variance = [square], square
    if p["centered"]:
        before = arrays.pop(0)
        mean = before + (grads - before) * (1.0 - p["alpha"])
        state.append(mean)
        variance = (square - mean * mean).clamp(min=0.0)
    moved = grads / (variance.sqrt() + p["eps"])
    if p["momentum"] > 0:
        moved = p["momentum"] * arrays.pop(0) + moved
        state.append(moved)
    return weights - lr * moved, torch.cat(state, dim=1)


def _adadelta(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    grads, weights = _decayed(rows, p, lr)
    squares, steps = rows.state.split(weights.shape[1], dim=1)
    square = p["rho"] * squares + (1.0 - p["rho"]) * (grads * grads)
    step = (steps + p["eps"]).sqrt() / (square + p["eps"]).sqrt() * grads
    return weights - lr * step, torch.cat([square, p["rho"] * steps + (1.0 - p["rho"]) * (step * step)], dim=1)


def _lion(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    grads, weights = _decayed(rows, p, lr)
    moved = rows.state + (grads - rows.state) * (1.0 - p["beta1"])
    return weights - lr * moved.sign(), rows.state + (grads - rows.state) * (1.0 - p["beta2"])


def _lamb(rows: RowsToUpdate, p: Mapping[str, Any], lr: float) -> tuple[Tensor, Tensor]:
    weights = rows.weights
    grads = rows.grads if p["decoupled"] else rows.grads + p["weight_decay"] * weights
    first, second = _moments(rows, grads, p)
    correction1, correction2 = _corrections(rows, p)
    step = first / correction1.float() / (second.sqrt() / correction2.sqrt().float() + p["eps"])
    if p["decoupled"]:
        step = step + p["weight_decay"] * weights
    size, moved = weights.norm(dim=1, keepdim=True), step.norm(dim=1, keepdim=True)
    ratio = torch.where((size > 0) & (moved > 0), size / moved, 1.0)
    return weights - lr * ratio * step, torch.cat([first, second], dim=1)


KERNELS: Mapping[str, Kernel] = MappingProxyType({
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "rmsprop": _rmsprop,
    "adadelta": _adadelta,
    "lion": _lion,
    "lamb": _lamb,
})  # fmt: skip


def sum_blocks(blocks: Sequence[tuple[Tensor, Tensor]], scale: float) -> tuple[Tensor, Tensor]:
    """Sums the gradients of several ranks by row, times ``scale``.

    Args:
        blocks: of each rank in rank order: rows, (n) int64, unique within the block, and gradients, (n, dim) float32.
        scale: the factor of every gradient.

    Returns:
        The rows, (u) int64, each once, and their sums, (u, dim) float32.
    """
    if len(blocks) == 1:  # nothing to look for, and no wait for the device
        ((rows, only),) = blocks
        return rows, only if scale == 1 else (only.to(torch.float64) * scale).float()
    rows, inverse = torch.unique(torch.cat([rows for rows, _ in blocks]), return_inverse=True)
    grads = torch.cat([grads for _, grads in blocks]).to(torch.float64) * scale
    sums = torch.zeros(rows.shape[0], grads.shape[1], dtype=torch.float64, device=grads.device)
    return rows, sums.index_add_(0, inverse, grads).float()


def is_nonfinite(grads: Tensor) -> Tensor:
    """(n) bool: whether a row of gradients, (n, dim), has NaN or Inf."""
    return (grads * 0.0).sum(dim=1) != 0  # only NaN and Inf times 0 are not 0


def seal_rows(grads: Tensor, scale: float, clip_row_norm: float) -> tuple[Tensor, Tensor | None]:
    """Multiplies gradients by ``scale`` and shortens rows to an L2 norm of ``clip_row_norm``.

    Args:
        grads: (n, dim) float32.
        scale: the factor of every gradient.
        clip_row_norm: the limit; infinity: none.

    Returns:
        The gradients, (n, dim) float32, and (n) bool: whether a row was shortened, None without a limit. A row with NaN
        or Inf stays as it is.
    """
    grads = grads if scale == 1 else grads * scale
    if clip_row_norm == float("inf"):
        return grads, None
    norms = grads.to(torch.float64).square().sum(dim=1).sqrt()
    is_long = (norms > clip_row_norm) & ~is_nonfinite(grads)
    shrink = torch.where(is_long, clip_row_norm / norms, 1.0).unsqueeze(1)
    return (grads.to(torch.float64) * shrink).float(), is_long
