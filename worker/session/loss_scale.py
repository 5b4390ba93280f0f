"""Lets a ``torch.amp.GradScaler`` judge dense and sparse gradients as one.

torch keeps, per optimizer and until ``update()``, whether its gradients were unscaled and had an Inf or NaN. That
record is read and written here and nowhere else, since it is not public: ``unscale_`` may have been called before
(for clipping), and a step that the sparse side or another rank refuses must be skipped by the dense side too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState


class LossScale:
    """One step's view of a scaler that is enabled."""

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
        """What gradients are multiplied by; waits for the device unless :meth:`set_scale` has told the scale."""
        return 1.0 / (self._scaler.get_scale() if self._scale is None else self._scale)

    def set_scale(self, scale: float) -> None:
        """Tells the scale, which was brought from the device."""
        self._scale = scale

    def found_on_device(self, dense: torch.optim.Optimizer | None) -> list[torch.Tensor]:
        """Unscales the dense gradients without waiting for the device; flags, () float32, not 0 for an Inf or NaN."""
        if dense is None:
            return []
        if self._record(dense)["stage"] is OptState.READY:
            self._scaler.unscale_(dense)
        return list(self._record(dense)["found_inf_per_device"].values())

    def _record(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        record: dict[str, Any] = self._scaler._per_optimizer_states[id(optimizer)]
        return record

    def unscale(self, dense: torch.optim.Optimizer) -> bool:
        """Unscales the dense gradients unless that was done; returns whether an Inf or NaN is among them."""
        return any(bool(found.item()) for found in self.found_on_device(dense))

    def finish(self, dense: torch.optim.Optimizer | None, sparse: torch.optim.Optimizer | None, *, skip: bool) -> None:
        """Steps ``dense`` unless ``skip``, and updates the scale, as torch does after a step taken or skipped."""
        found = torch.full((), float(skip), dtype=torch.float32, device=self._scaler._scale.device)  # type: ignore[union-attr]
        if sparse is not None:
            self._record(sparse)["found_inf_per_device"] = {found.device: found}
        if dense is not None:
            record = self._record(dense)
            for flag in record["found_inf_per_device"].values():
                flag.fill_(float(skip))
            if not skip:
                dense.step()  # the verdict is known here, so the scaler need not ask the device for it
            record["stage"] = OptState.STEPPED
        self._scaler.update()

    def forget(self, dense: torch.optim.Optimizer | None) -> None:
        """After a step that failed: the gradients are gone, the scale stays."""
        if dense is not None:
            self._scaler._per_optimizer_states.pop(id(dense), None)


class ScaleOfLoop(LossScale):
    """The view of a step that the scaler itself makes: its loop calls ``scaler.step(optimizer)`` and ``update()``.

    Args:
        scaler: that is stepping.
        stepped: the optimizer that the loop knows; its record holds what the scaler found.
        grad_scale: what the dense gradients are scaled by; None when the loop has unscaled them.
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

    def finish(self, dense: torch.optim.Optimizer | None, sparse: torch.optim.Optimizer | None, *, skip: bool) -> None:
        """Steps ``dense`` unless ``skip``, and tells the scaler, whose loop updates the scale."""
        found = torch.full((), float(skip), dtype=torch.float32, device=self._scaler._scale.device)  # type: ignore[union-attr]
        if sparse is not None:
            self._record(sparse)["found_inf_per_device"] = {found.device: found}
        for flag in self._record(self._stepped)["found_inf_per_device"].values():
            flag.fill_(float(skip))
        if dense is not None and not skip:
            dense.step()

    def forget(self, dense: torch.optim.Optimizer | None) -> None:
        """After a step that failed: the gradients are gone, the scale stays."""
        super().forget(dense)
        self._scaler._per_optimizer_states.pop(id(self._stepped), None)
