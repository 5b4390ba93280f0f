"""Learning rates of the distributed tables, as an optimizer that torch's schedulers take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...proto.errors import FailedPrecondition


class SparseOptimizer(torch.optim.Optimizer):
    """One parameter group per table: ``{"name": table, "lr": float, "params": [anchor]}``.

    The updates run on the servers; ``lr`` of each group travels with every commit. ``session.step`` calls
    :meth:`step`, so a scheduler sees the order it expects; no other code may.
    """

    def __init__(self, name: str, anchor: Tensor, *, lr: float) -> None:
        self._in_session_step = False
        super().__init__([{"params": [anchor], "name": name, "lr": lr}], {"lr": lr})

    def add_table(self, name: str, anchor: Tensor, *, lr: float) -> None:
        """Adds the group of one more table."""
        self.add_param_group({"params": [anchor], "name": name, "lr": lr})

    def learning_rates(self) -> dict[str, float]:
        """The learning rate of each table now."""
        return {group["name"]: float(group["lr"]) for group in self.param_groups}

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Marks the end of a step for schedulers.

        Raises:
            FailedPrecondition: called by anyone but ``session.step``.
        """
        del closure
        if not self._in_session_step:
            raise FailedPrecondition("session.optimizer.step: call session.step(dense), which commits the sparse rows")

    def step_from_session(self) -> None:
        """What ``session.step`` calls."""
        self._in_session_step = True
        try:
            self.step()
        finally:
            self._in_session_step = False
