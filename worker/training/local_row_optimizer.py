"""The row optimizers of the servers for local tables with sparse gradients, by torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...cpp_ext.device.row_optimizers import KERNELS, RowsToUpdate
from ...proto.native import optimizer_parameters
from ...proto.optim import RowOptimizer


class LocalRowOptimizer(torch.optim.Optimizer):
    """Moves the rows that have a gradient, as a server does, and leaves all others as they are.

    Moments, momentum and decay of a row are those of its own updates, and bias correction counts them. torch's own
    optimizers count the steps of all rows together, or do not take sparse gradients at all.

    Args:
        weights: the weights of the tables, each (rows, dim) float32, whose gradients are sparse.
        optimizer: the optimizer, of a kind in ``KERNELS``; its ``lr`` is where the learning rate of the group begins.
    """

    def __init__(self, weights: Sequence[nn.Parameter], optimizer: RowOptimizer) -> None:
        super().__init__(weights, {"lr": optimizer.lr})
        self._row_optimizer = optimizer
        kind, self._parameters = optimizer_parameters(optimizer)
        self._kernel = KERNELS[kind]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Moves all rows that have a gradient; ``closure`` is not called."""
        del closure
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, weight.grad.coalesce(), float(group["lr"]))

    def _step(self, weight: Tensor, grad: Tensor, lr: float) -> None:
        state, rows = self.state[weight], grad.indices()[0]
        if not state:
            floats = self._row_optimizer.state_floats(weight.shape[1])
            first = float(self._parameters.get("initial_accumulator", 0.0))
            state["rows"] = weight.new_full((weight.shape[0], floats), first)
            state["counts"] = torch.zeros(weight.shape[0], dtype=torch.int32, device=weight.device)
        counts = state["counts"].index_select(0, rows) + 1
        before = RowsToUpdate(
            weight.index_select(0, rows), state["rows"].index_select(0, rows), counts, grad.values().to(weight.dtype)
        )
        weights, after = self._kernel(before, self._parameters, lr)
        weight.index_copy_(0, rows, weights)
        state["rows"].index_copy_(0, rows, after)
        state["counts"].index_copy_(0, rows, counts)
