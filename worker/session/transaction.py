"""Ends a step: all ranks vote over dense and sparse gradients, and then both sides are updated or neither is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ...cpp_ext import _client
from ...cpp_ext.device_step import StepOnDevice
from ...proto.errors import FailedPrecondition, OutsideQuorum, SparserowError
from .background_push import BackgroundPush
from .commit_doubt import fenced_in_doubt
from .dense_step import step_dense
from .device_side import DeviceSide, SealedRows
from .join import collective_device
from .loss_scale import LossScale
from .sparse_optimizer import SparseOptimizer
from .tracing import Trace

NonFinitePolicy: TypeAlias = Literal["raise", "skip"]

# Votes; the highest vote of all ranks decides.
_COMMIT, _NOT_FINITE, _REFUSED = 0, 1, 2
_OUTSIDE = 3  # the step has its quorum without this worker; workers of a job with a quorum do not vote


class NonFiniteGradient(FailedPrecondition, FloatingPointError):  # noqa: N818 - names are the taxonomy's
    """A gradient has NaN or Inf; the step was refused and nothing was applied."""


def end_step(
    native: _client.NativeSession,
    sparse: SparseOptimizer | None,
    *,
    dense: torch.optim.Optimizer | None,
    scale: LossScale | None,
    allow_empty: bool,
    is_distributed: bool,
    on_nonfinite: NonFinitePolicy,
    clip_row_norm: float | None = None,
    pushes: BackgroundPush | None = None,
    trace: Trace,
    on_device: StepOnDevice | None = None,
    refusal: SparserowError | None = None,
    on_ranks: DeviceSide | None = None,
    note_empty: Callable[[], None] | None = None,
) -> bool:
    """Does the work of :meth:`Session.step`, which has the other arguments, the result and the errors.

    Args:
        native: the native half of the session.
        sparse: the optimizer with the tables' learning rates; None: there is no table, or the step is empty.
        dense: the optimizer of the dense side; None: there is none here.
        scale: the enabled scaler of the loss; None: the loss is not scaled.
        allow_empty: see :meth:`Session.step`.
        is_distributed: whether the job has several workers.
        on_nonfinite: what happens with NaN or Inf when ``scale`` is None.
        clip_row_norm: see :meth:`Session.step`.
        pushes: the thread that sends the last phase of the commit; None: this call sends it.
        trace: the trace that receives the spans.
        refusal: the error with which this rank refuses the step; None: it refuses nothing.
        on_ranks: the tables on the devices of the ranks; None: there are none.
        note_empty: is called when backward has brought gradients of no row; None: such a step is no mistake.

    Invariants:
     1. Every rank that reaches the vote takes part in it.
     2. The dense optimizer steps only after the commit is done, or, with ``pushes``, prepared on every shard.
     3. However the call ends, the step's gradients are gone and the session is open.
    """
    if sparse is not None and sparse.trains_rows and not allow_empty and native.staged_calls == 0:
        raise FailedPrecondition(
            "session.step: no backward reached a distributed table in this step; call loss.backward() before it, with "
            "the model in train mode (or pass allow_empty=True)"
        )
    step = native.step
    is_voting = is_distributed and dist.is_available() and dist.is_initialized()
    try:
        dense_is_bad = _judge_dense(dense, scale, on_device)
        unscale, most = 1.0 if scale is None else scale.inverse, math.inf if clip_row_norm is None else clip_row_norm
        sealed = native.seal(unscale, clip_row_norm=most)
        bad = SealedRows(*sealed[1:])
        if sealed[0] == 0 and note_empty is not None and on_ranks is None and not allow_empty:
            note_empty()
        if on_ranks is not None:
            there = on_ranks.seal(unscale, most)
            bad = bad if bad.rows else there
            with trace.span("exchange", step=step):
                on_ranks.exchange({} if sparse is None else sparse.learning_rates())
        vote = _COMMIT
        if refusal is not None:
            vote = _REFUSED
        elif bad.rows or dense_is_bad:
            vote = _NOT_FINITE
        elif is_voting or native.shard_count > 1 or pushes is not None or on_ranks is not None:
            try:
                if on_ranks is not None:
                    on_ranks.prepare()
                with trace.span("push", step=step):
                    native.prepare()
            except OutsideQuorum:
                vote = _OUTSIDE
            except SparserowError as error:
                vote, refusal = _REFUSED, error
        with trace.span("vote", step=step):
            verdict = _highest_vote(vote) if is_voting else vote
        if verdict == _COMMIT:
            try:
                _commit(native, pushes, trace)
            except OutsideQuorum:
                verdict = _OUTSIDE
            if on_ranks is not None:
                on_ranks.apply()
        elif verdict != _OUTSIDE:  # the session has aborted that step already, and its clock has gone on
            native.abort()
        if verdict == _REFUSED:
            raise refusal or FailedPrecondition("session.step: another rank's commit was refused; nothing was applied")
        is_skipped = verdict in (_NOT_FINITE, _OUTSIDE)
        if verdict == _NOT_FINITE and scale is None and on_nonfinite == "raise":
            raise NonFiniteGradient(_nonfinite_text(bad, dense_is_bad))
        if sparse is not None and (verdict == _OUTSIDE or not is_skipped):  # for schedulers the job's step is over
            sparse.step_from_session()
        if scale is not None:
            scale.finish(dense, sparse, skip=is_skipped, step=step)
        elif dense is not None and not is_skipped:
            step_dense(dense, step)
    except BaseException:
        if scale is not None:
            scale.forget(dense)
        raise
    finally:
        native.reopen()
        if on_ranks is not None:
            on_ranks.forget()
        if dense is not None:
            dense.zero_grad(set_to_none=True)
    return not is_skipped


def _commit(native: _client.NativeSession, pushes: BackgroundPush | None, trace: Trace) -> None:
    if pushes is not None:
        pushes.send(trace)
        return
    with trace.span("push", step=native.step), fenced_in_doubt():
        if native.is_prepared:
            native.commit_prepared()
        else:
            native.commit()


def _judge_dense(dense: torch.optim.Optimizer | None, scale: LossScale | None, on_device: StepOnDevice | None) -> bool:
    """Unscales the dense gradients and says whether one has NaN or Inf.

    Where lookups are on a device the answer comes with the gradients of the rows, in the step's one wait for it.
    """
    if on_device is None or not on_device.is_used:
        return dense is not None and (scale.unscale(dense) if scale else has_nonfinite(dense))
    if scale is not None:
        found = scale.found_on_device(dense)
        carried = [on_device.carry(tensor) for tensor in (scale.tensor, *found)]
    else:
        flag = None if dense is None else nonfinite_flag(dense)
        carried = [] if flag is None else [on_device.carry(flag)]
    on_device.flush()
    if scale is not None:
        scale.set_scale(float(carried.pop(0).values()))
    return any(bool(each.values()) for each in carried)


def has_nonfinite(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a gradient of the optimizer's parameters has NaN or Inf."""
    values = _gradients(optimizer)
    if all(value.is_cpu and value.dtype is torch.float32 and value.is_contiguous() for value in values):
        return not _client.are_finite([(value.data_ptr(), value.numel()) for value in values])
    # On the host the 2-norm takes a thirtieth of the time of the maximum norm. It is not finite when a value is not, or
    # when a sum of squares overflows; then the maximum decides.
    if all(value.device.type == "cpu" for value in values) and _norms_are_finite(values):
        return False
    flag = _nonfinite_flag_of(values)
    return flag is not None and bool(flag.item())


def nonfinite_flag(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Returns () bool on the device of the gradients: whether one has NaN or Inf; None where there is no gradient.

    A tensor in parts is judged by this rank's part, as the vote of all ranks decides.
    """
    return _nonfinite_flag_of(_gradients(optimizer))


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the values of all gradients that are not empty."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    values = [grad.coalesce().values() if grad.is_sparse else local_part(grad) for grad in grads]
    return [value for value in values if value.numel() > 0]


def _nonfinite_flag_of(values: list[Tensor]) -> Tensor | None:
    return ~torch.isfinite(torch.nn.utils.get_total_norm(values, norm_type=math.inf)) if values else None


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


def _highest_vote(vote: int) -> int:
    ballot = torch.tensor([vote], dtype=torch.int32, device=collective_device())
    dist.all_reduce(ballot, op=dist.ReduceOp.MAX)
    return int(ballot.item())


def _nonfinite_text(bad: SealedRows, dense_is_bad: bool) -> str:
    if bad.rows:
        who = f"table {bad.table!r}: the gradient of key {bad.key} is not finite ({bad.rows} such rows)"
    else:
        who = "a dense gradient is not finite" if dense_is_bad else "a gradient of another rank is not finite"
    return f"{who}; the step was refused and nothing was applied (lower the learning rate, or set on_nonfinite='skip')"
