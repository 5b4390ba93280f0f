"""Ends a step: all ranks vote over it, and then every participant changes what it holds, or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from ...cpp_ext.device.link import numbers_of
from ...proto.errors import FailedPrecondition, OutsideQuorum, SparserowError
from .join import collective_device
from .participant import Participant, Seal, Step

# Votes; the highest vote of all ranks decides.
_COMMIT, _NOT_FINITE, _REFUSED = 0, 1, 2
_OUTSIDE = 3  # the step has its quorum without this worker; workers of a job with a quorum do not vote


class NonFiniteGradient(FailedPrecondition, FloatingPointError):  # noqa: N818 - names are the taxonomy's
    """A gradient has NaN or Inf; the step was refused and nothing was applied."""


def end_step(participants: Sequence[Participant], step: Step) -> bool:
    """Ends a step by the contract of participant.py; every rank that reaches the vote takes part in it.

    Args:
        participants: in the order of their commits.
        step: the step.

    Returns:
        Whether the step was taken; False when it was skipped.

    Raises:
        NonFiniteGradient: a gradient of a rank has NaN or Inf, and the step raises that.
        SparserowError: a rank has refused the step, or its outcome is not known.
    """
    has_failed = True
    try:
        vote, refusal, nonfinite = _prepared(participants, step)
        with step.trace.span("vote", step=step.number):
            verdict = _highest_vote(vote) if step.is_voting else vote
        if verdict == _COMMIT:
            try:
                for each in participants:
                    each.commit(step)
            except OutsideQuorum:
                verdict = _OUTSIDE
        is_skipped = verdict in (_NOT_FINITE, _OUTSIDE)
        if verdict != _COMMIT:
            _abort(participants, step, is_skipped=is_skipped)
        if verdict == _REFUSED:
            raise refusal or FailedPrecondition("session.step: another rank's commit was refused; nothing was applied")
        if verdict == _NOT_FINITE and step.raises_nonfinite:
            raise NonFiniteGradient(
                f"{nonfinite or 'a gradient of another rank is not finite'}; the step was refused and nothing was "
                "applied (lower the learning rate, or set on_nonfinite='skip')"
            )
        has_failed = False
        return not is_skipped
    finally:
        _forget(participants, step, has_failed=has_failed)


def discard_step(participants: Sequence[Participant], step: Step) -> None:
    """Ends a step that is not to be taken."""
    has_failed = True
    try:
        _abort(participants, step, is_skipped=False)
        has_failed = False
    finally:
        _forget(participants, step, has_failed=has_failed)


def _prepared(participants: Sequence[Participant], step: Step) -> tuple[int, SparserowError | None, str]:
    """Seals and prepares a step; returns this rank's vote, why it refuses, and which gradient is not finite."""
    sealed = _judged([each.seal(step) for each in reversed(participants)])
    refusal = next((seal.refusal for seal in sealed if seal.refusal is not None), None)
    nonfinite = next((seal.nonfinite for seal in reversed(sealed) if seal.nonfinite), "")
    if refusal is not None:
        return _REFUSED, refusal, nonfinite
    if nonfinite:
        return _NOT_FINITE, None, nonfinite
    try:
        for each in reversed(participants):
            each.prepare(step)
    except OutsideQuorum:
        return _OUTSIDE, None, ""
    except SparserowError as error:
        return _REFUSED, error, ""
    return _COMMIT, None, ""


def _judged(seals: Sequence[Seal]) -> list[Seal]:
    """Returns seals of which nothing is pending, after one wait for each device on which numbers are."""
    judged = list(seals)
    numbers: dict[torch.device, list[torch.Tensor]] = {}
    for seal in seals:
        if seal.pending is not None:
            numbers.setdefault(seal.pending.numbers[0].device, []).extend(seal.pending.numbers)
    values = {device: iter(numbers_of(torch.stack(of_device))) for device, of_device in numbers.items()}
    for at, seal in enumerate(seals):
        if seal.pending is not None:
            mine = values[seal.pending.numbers[0].device]
            judged[at] = seal.pending.judge([next(mine) for _ in seal.pending.numbers])
    return judged


def _abort(participants: Sequence[Participant], step: Step, *, is_skipped: bool) -> None:
    _each(lambda each: each.abort(step, is_skipped=is_skipped), reversed(participants))


def _forget(participants: Sequence[Participant], step: Step, *, has_failed: bool) -> None:
    _each(lambda each: each.forget(step, has_failed=has_failed), participants)


def _each(call: Callable[[Participant], None], participants: Iterable[Participant]) -> None:
    """Makes a call of each participant, because an error of one must not keep the others from it; raises the first."""
    first: BaseException | None = None
    for each in participants:
        try:
            call(each)
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def is_voting(*, is_distributed: bool) -> bool:
    """Returns whether ranks vote over each step: the job has several, and a process group of torch.distributed."""
    return is_distributed and dist.is_available() and dist.is_initialized()


def _highest_vote(vote: int) -> int:
    ballot = torch.tensor([vote], dtype=torch.int32, device=collective_device())
    dist.all_reduce(ballot, op=dist.ReduceOp.MAX)
    return int(ballot.item())
