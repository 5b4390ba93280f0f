"""The optimizer of the dense side, as it takes part in a step: it judges its gradients first, and steps last."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from ...cpp_ext import _client
from ...cpp_ext.device_step import StepOnDevice
from .dense_step import step_dense
from .loss_scale import LossScale
from .participant import SEALED, NoPart, Pending, Seal, Step


class DenseOptimizer(NoPart):
    """The dense side of a step, which may have no optimizer; and what lookups have brought to a device.

    Args:
        on_device: what the session's step has on a device.
    """

    def __init__(self, on_device: StepOnDevice) -> None:
        self._on_device = on_device

    @override
    def seal(self, step: Step) -> Seal:
        """Unscales the dense gradients, and brings those of rows from the device.

        Where lookups are on a device the verdict comes with the gradients of the rows, in the step's one wait for it.
        """
        if self._on_device.is_used:
            is_bad = self._judge_on_device(step.dense, step.scale)
        elif step.dense is None:
            return SEALED
        elif step.scale is not None:
            is_bad = step.scale.unscale(step.dense)
        else:
            norm = norm_on_device(step.dense)
            if norm is not None:
                return Seal(pending=Pending([norm], lambda norms: _seal_of(not math.isfinite(norms[0]))))
            is_bad = has_nonfinite(step.dense)
        return _seal_of(is_bad)

    def _judge_on_device(self, dense: torch.optim.Optimizer | None, scale: LossScale | None) -> bool:
        on_device = self._on_device
        if scale is None:
            norm = None if dense is None else _largest(_gradients(dense))
            carried = [] if norm is None else [on_device.carry(norm)]
            on_device.flush()
            return not all(math.isfinite(float(each.values())) for each in carried)
        found = [on_device.carry(tensor) for tensor in (scale.tensor, *scale.found_on_device(dense))]
        on_device.flush()
        scale.set_scale(float(found[0].values()))
        return any(bool(each.values()) for each in found[1:])

    @override
    def commit(self, step: Step) -> None:
        """Steps the optimizer.

        Raises:
            FailedPrecondition: its step raised, and the rows are committed; the text says so.
        """
        if step.scale is not None:
            step.scale.finish(step.dense, step.sparse, skip=False, step=step.number)
        elif step.dense is not None:
            step_dense(step.dense, step.number)

    @override
    def abort(self, step: Step, *, is_skipped: bool) -> None:
        """Has the scaler of the loss lower its scale after a step that is skipped."""
        if is_skipped and step.scale is not None:
            step.scale.finish(step.dense, step.sparse, skip=True, step=step.number)

    @override
    def forget(self, step: Step, *, has_failed: bool) -> None:
        """Drops the dense gradients and what is on the device."""
        if has_failed and step.scale is not None:
            step.scale.forget(step.dense)
        self._on_device.forget()
        if step.dense is not None:
            step.dense.zero_grad(set_to_none=True)


def has_nonfinite(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a gradient of the optimizer's parameters has NaN or Inf."""
    values = _gradients(optimizer)
    if all(value.is_cpu and value.dtype is torch.float32 and value.is_contiguous() for value in values):
        return not _client.are_finite([(value.data_ptr(), value.numel()) for value in values])
    # On the host the 2-norm takes a thirtieth of the time of the maximum norm. It is not finite when a value is not, or
    # when a sum of squares overflows; then the maximum decides.
    if all(value.device.type == "cpu" for value in values) and _norms_are_finite(values):
        return False
    largest = _largest(values)
    return largest is not None and not math.isfinite(largest.item())


def norm_on_device(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Returns () float32 that is finite where all gradients are; None where one is on the host, or there is none.

    A tensor in parts is judged by this rank's part, as the vote of all ranks decides.
    """
    values = _gradients(optimizer)
    return None if any(value.is_cpu for value in values) else _largest(values)


def _seal_of(is_bad: bool) -> Seal:
    return Seal("a dense gradient is not finite") if is_bad else SEALED


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the values of all gradients that are not empty."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    values = [grad.coalesce().values() if grad.is_sparse else local_part(grad) for grad in grads]
    return [value for value in values if value.numel() > 0]


def _largest(values: list[Tensor]) -> Tensor | None:
    """Returns () float32: the largest absolute value; None where there is none."""
    return torch.nn.utils.get_total_norm(values, norm_type=math.inf).float() if values else None


def _norms_are_finite(values: list[Tensor]) -> bool:
    norms = torch._foreach_norm(values, 2.0) if values else ()
    return math.isfinite(sum(norm.item() for norm in norms))


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, as under FSDP2, or the tensor itself when it is none.

    Parts that are summands of a tensor are summed first; every rank of the mesh takes part in that.
    """
    if not hasattr(tensor, "to_local"):
        return tensor
    if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
        whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        return whole
    part: Tensor = tensor.to_local()
    return part
