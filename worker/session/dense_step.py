"""Checks the optimizer of the dense side before a step moves anything, and makes its step after the rows' commit."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed


def check_optimizer(dense: object, method: str) -> None:
    """Checks that a session can step ``dense``.

    Args:
        dense: the optimizer that a user gave.
        method: the method that it was given to, such as ``"session.step"``; error texts name it.

    Raises:
        InvalidArgument: ``dense`` is not an optimizer, or calls its closure several times a step.
    """
    if not isinstance(dense, torch.optim.Optimizer):
        raise not_allowed(f"{method}.dense: type", type(dense).__name__, "torch.optim.Optimizer")
    kind: Any = type(dense)  # mypy takes no type of optimizers for hashable
    if _needs_closure(kind):
        raise InvalidArgument(
            f"{method}: {kind.__name__} calls its closure several times a step, but rows are updated once a "
            "step; allowed: optimizers whose step() needs no closure"
        )


def check_gradients(dense: torch.optim.Optimizer) -> None:
    """Checks that ``dense`` takes the gradients of its parameters.

    Raises:
        InvalidArgument: it is a SparseAdam, and a gradient is dense.
    """
    if not isinstance(dense, torch.optim.SparseAdam):
        return
    grads = [parameter.grad for group in dense.param_groups for parameter in group["params"]]
    if any(grad is not None and not grad.is_sparse for grad in grads):
        raise InvalidArgument(
            "session.step: SparseAdam takes sparse gradients alone, and a gradient of its parameters is dense; "
            "allowed: an optimizer of dense gradients, such as torch.optim.Adam"
        )


def step_dense(dense: torch.optim.Optimizer, step: int | None) -> None:
    """Steps ``dense`` after the rows of a step were committed.

    Args:
        dense: the optimizer of the dense side.
        step: the number of the step whose rows were committed; None: there is no session, and errors stay as they are.

    Raises:
        FailedPrecondition: ``dense.step()`` raised; its error is the cause.
    """
    if step is None:
        dense.step()
        return
    try:
        dense.step()
    except Exception as error:
        raise FailedPrecondition(
            f"session.step: the rows of step {step} were committed, and then {type(dense).__name__}.step() raised "
            f"{type(error).__name__}: {error}; the dense weights were not updated, or only in part, and their "
            "gradients are gone: restore a checkpoint, or go on without this dense update"
        ) from error


@functools.lru_cache(maxsize=64)
def _needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
