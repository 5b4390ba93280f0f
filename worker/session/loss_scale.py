"""Lets a ``torch.amp.GradScaler`` judge dense and sparse gradients together.

For each optimizer, torch records until ``update()`` whether the gradients were unscaled and had an Inf or NaN. That
record is not public, so only this module reads and writes it. It needs the record for two reasons: ``unscale_`` may
have been called before, for clipping; and the dense side must skip a step that the sparse side or another rank refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from .dense_step import step_dense


def unscale(scaler: GradScaler, dense: torch.optim.Optimizer) -> None:
    """Unscales the gradients of an optimizer, as ``scaler.unscale_`` does.

    torch refuses gradients of which some are DTensors and some are not, as in a tensor group. The parts of this rank
    are unscaled then, and the scaler's record says whether one of them has an Inf or NaN; the ranks' vote compares it.
    """
    grads: list[Any] = [p.grad for group in dense.param_groups for p in group["params"] if p.grad is not None]
    if len({hasattr(grad, "to_local") for grad in grads}) < 2:
        scaler.unscale_(dense)
        return
    scale: torch.Tensor = scaler._scale  # type: ignore[assignment]
    found = torch.zeros((), dtype=torch.float32, device=scale.device)
    parts = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    torch._amp_foreach_non_finite_check_and_unscale_(parts, found, scale.double().reciprocal().float())
    scaler._per_optimizer_states[id(dense)].update(found_inf_per_device={found.device: found}, stage=OptState.UNSCALED)


class LossScale:
    """An enabled scaler for one step of the session, which calls the scaler's ``step`` and ``update`` itself.

    Attributes:
        inverse: the factor that unscales gradients, 1 / scale.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._scale: float | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """() float32 on the scaler's device: the scale."""
        scale: torch.Tensor = self._scaler._scale  # type: ignore[assignment]
        return scale

    @property
    def inverse(self) -> float:
        """What gradients are multiplied by; waits for the device unless :meth:`set_scale` has set the scale."""
        return 1.0 / (self._scaler.get_scale() if self._scale is None else self._scale)

    def set_scale(self, scale: float) -> None:
        """Sets the scale, which came from the device."""
        self._scale = scale

    def found_on_device(self, dense: torch.optim.Optimizer | None) -> list[torch.Tensor]:
        """Unscales the dense gradients without waiting for the device; flags, () float32, not 0 for an Inf or NaN."""
        if dense is None:
            return []
        if self._record(dense)["stage"] is OptState.READY:
            unscale(self._scaler, dense)
        return list(self._record(dense)["found_inf_per_device"].values())

    def _record(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        record: dict[str, Any] = self._scaler._per_optimizer_states[id(optimizer)]
        return record

    def _note_verdict(self, sparse: torch.optim.Optimizer | None, *, skip: bool) -> None:
        """Has the scaler know of the tables' optimizer whether the step is skipped."""
        if sparse is not None:
            found = torch.full((), float(skip), dtype=torch.float32, device=self._scaler._scale.device)  # type: ignore[union-attr]
            self._record(sparse)["found_inf_per_device"] = {found.device: found}

    def unscale(self, dense: torch.optim.Optimizer) -> bool:
        """Unscales the dense gradients unless that was done; returns whether an Inf or NaN is among them."""
        return any(bool(found.item()) for found in self.found_on_device(dense))

    def finish(
        self,
        dense: torch.optim.Optimizer | None,
        sparse: torch.optim.Optimizer | None,
        *,
        skip: bool,
        step: int | None = None,
    ) -> None:
        """Steps ``dense`` unless ``skip``, and updates the scale, as torch does after a step taken or skipped.

        Args:
            dense: the optimizer of the dense side; None: there is none here.
            sparse: the optimizer with the tables' learning rates; None: there is no table.
            skip: whether the step is skipped.
            step: the number of the session's step, whose rows were committed; None: there is no session.
        """
        self._note_verdict(sparse, skip=skip)
        if dense is not None:
            record = self._record(dense)
            for flag in record["found_inf_per_device"].values():
                flag.fill_(float(skip))
            if not skip:
                step_dense(dense, step)  # the verdict is known here, so the scaler need not ask the device for it
            record["stage"] = OptState.STEPPED
        self._scaler.update()

    def forget(self, dense: torch.optim.Optimizer | None) -> None:
        """Removes the scaler's record of a step that failed: its gradients are gone, the scale stays."""
        if dense is not None:
            self._scaler._per_optimizer_states.pop(id(dense), None)


class ScaleOfLoop(LossScale):
    """An enabled scaler for one step of a loop that calls ``scaler.step(optimizer)`` and ``scaler.update()`` itself.

    Args:
        scaler: the scaler whose ``step`` is running.
        stepped: the wrapped optimizer that the loop gave to the scaler; the scaler's findings are in its record.
        grad_scale: the factor by which the dense gradients are scaled; None when the loop has unscaled them.
    """

    def __init__(self, scaler: GradScaler, stepped: torch.optim.Optimizer, grad_scale: torch.Tensor | None) -> None:
        super().__init__(scaler)
        self._stepped = stepped
        self._grad_scale = grad_scale

    def found_on_device(self, dense: torch.optim.Optimizer | None) -> list[torch.Tensor]:
        """Unscales the dense gradients unless the loop has; flags, () float32, not 0 for an Inf or NaN."""
        if self._grad_scale is not None and dense is not None:
            grads = [p.grad for group in dense.param_groups for p in group["params"] if p.grad is not None]
            for grad in grads:
                (grad._values() if grad.is_sparse else grad).mul_(self.inverse)
        return list(self._record(self._stepped)["found_inf_per_device"].values())

    def finish(
        self,
        dense: torch.optim.Optimizer | None,
        sparse: torch.optim.Optimizer | None,
        *,
        skip: bool,
        step: int | None = None,
    ) -> None:
        """Steps ``dense`` unless ``skip``, and records for the scaler whether the step was skipped.

        The loop updates the scale.
        """
        self._note_verdict(sparse, skip=skip)
        for flag in self._record(self._stepped)["found_inf_per_device"].values():
            flag.fill_(float(skip))
        if dense is not None and not skip:
            step_dense(dense, step)

    def forget(self, dense: torch.optim.Optimizer | None) -> None:
        """Removes the scaler's records of a step that failed: its gradients are gone, the scale stays."""
        super().forget(dense)
        self._scaler._per_optimizer_states.pop(id(self._stepped), None)
