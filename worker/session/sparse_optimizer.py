"""An optimizer that holds the learning rates of the distributed tables, so that torch's schedulers can set them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from ...proto.errors import FailedPrecondition, InvalidArgument

_OWN_GLOBAL_HOOKS = 1  # that of step_watch.py, which ignores steps of the session


class _Defaults(dict[str, Any]):
    """The defaults of an optimizer whose momentum no scheduler can set. OneCycleLR and CyclicLR look there for it."""

    def __contains__(self, name: object) -> bool:
        # They ask for it last, before an error of their own that names no remedy. Others ask too, as a callback that
        # logs the momentum.
        if name == "betas" and sys._getframe(1).f_globals.get("__name__") == "torch.optim.lr_scheduler":
            raise InvalidArgument(
                "session.optimizer: the momentum of rows is an option of their table, which does not change while they "
                "train; pass cycle_momentum=False"
            )
        return super().__contains__(name)


class SparseOptimizer(torch.optim.Optimizer):
    """One parameter group per table: ``{"name": table, "lr": float, "frozen": bool, "params": [anchor]}``.

    A frozen table keeps the learning rate that it has once it trains, so that a schedule goes on.

    The updates run on the servers; ``lr`` of each group travels with every commit. ``session.step`` calls
    :meth:`step`, so a scheduler sees the order that it expects; no other code may call it.

    Args:
        name: the name of the first table.
        anchor: the anchor parameter of the first table's layer.
        lr: the learning rate of the first table.
        frozen: whether this job does not train the first table.
    """

    def __init__(self, name: str, anchor: Tensor, *, lr: float, frozen: bool = False) -> None:
        self._in_session_step = False
        super().__init__([{"params": [anchor], "name": name, "lr": lr, "frozen": frozen}], _Defaults(lr=lr))

    def add_table(self, name: str, anchor: Tensor, *, lr: float, frozen: bool = False) -> None:
        """Adds the parameter group of one more table.

        Args:
            name: the name of the table.
            anchor: the anchor parameter of the table's layer.
            lr: the learning rate of the table.
            frozen: whether this job does not train the table.
        """
        self.add_param_group({"params": [anchor], "name": name, "lr": lr, "frozen": frozen})

    def set_frozen(self, name: str, frozen: bool) -> None:
        """Says whether this job trains a table from now on."""
        for group in self.param_groups:
            if group["name"] == name:
                group["frozen"] = frozen

    @property
    def trains_rows(self) -> bool:
        """Whether this job trains a table."""
        return not all(group["frozen"] for group in self.param_groups)

    def learning_rates(self) -> dict[str, float]:
        """Returns the current learning rate of each table, by the table's name."""
        return {group["name"]: float(group["lr"]) for group in self.param_groups}

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Marks the end of a step for schedulers.

        Raises:
            FailedPrecondition: the caller is not ``session.step``.
        """
        del closure
        if not self._in_session_step:
            raise FailedPrecondition("session.optimizer.step: call session.step(dense), which commits the sparse rows")

    def step_from_session(self) -> None:
        """Steps on behalf of ``session.step``, which is the only caller.

        Nothing is computed here. So torch's wrapper of :meth:`step`, which records a span of its profiler, is only
        called where a hook wants it; a scheduler looks at ``_opt_called`` alone.
        """
        if not self._is_watched():
            self._opt_called = True
            return
        self._in_session_step = True
        try:
            self.step()
        finally:
            self._in_session_step = False

    def _is_watched(self) -> bool:
        """Whether other code than a scheduler of torch wants to know of each step: a hook, or a wrapper of ``step``."""
        wrapper = vars(self).get("step")
        return bool(
            (wrapper is not None and not hasattr(wrapper, "_wrapped_by_lr_sched"))
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or len(torch_optimizer._global_optimizer_post_hooks) > _OWN_GLOBAL_HOOKS
        )
