"""Calls that every rank makes together, so that an error of one is an error of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ...proto.errors import SparserowError, error_of
from ...proto.process.lone_work import lone_work
from ..session.rank_beats import give_signs, meet

Value = TypeVar("Value")


def is_in_parts(model: nn.Module | None) -> bool:
    """Returns whether a parameter of the model is a DTensor, so that ranks have it in parts."""
    return model is not None and any(hasattr(parameter, "to_local") for parameter in model.parameters())


def part_again(model: nn.Module | None) -> None:
    """Frees the whole weights that FSDP2 keeps after a forward without a backward, such as that of an evaluation.

    Until then the parameters of the model are plain tensors, and not the parts that ranks save and load.
    """
    for module in () if model is None else model.modules():
        reshard = getattr(module, "reshard", None)  # of FSDPModule, whose import is slow
        if callable(reshard):
            reshard()


def on_every_rank(call: Callable[[], Value], *, what: str = "checkpoint") -> Value:
    """Returns the result of ``call``, which every rank makes, unless it fails on one.

    A rank whose call takes longer is waited for as long as it lives.

    Args:
        call: what this rank does.
        what: what all of them do, for errors.

    Raises:
        SparserowError: the error of the lowest rank on which the call failed; every rank raises it.
    """
    outcome, failure = None, None
    give_signs()
    try:
        with lone_work.doing(what):
            outcome = call()
    except SparserowError as error:
        failure = error
    fault = None if failure is None else (failure.number, str(failure))
    meet(what)
    for rank, other in enumerate(gathered(fault)):
        if failure is None and other is not None:
            failure = error_of(other[0], f"rank {rank}: {other[1]}")
    if failure is not None:
        raise failure
    return outcome  # type: ignore[return-value]


def is_alone() -> bool:
    """Returns whether this process has no process group."""
    return not (dist.is_available() and dist.is_initialized())


def rank_here() -> int:
    """Returns the rank of this process, 0 without a process group."""
    return 0 if is_alone() else dist.get_rank()


def ranks() -> int:
    """Returns the number of ranks, 1 without a process group."""
    return 1 if is_alone() else dist.get_world_size()


def gathered(value: Value) -> list[Value]:
    """Returns every rank's value, in rank order."""
    if is_alone():
        return [value]
    values: list[Any] = [None] * ranks()
    dist.all_gather_object(values, value)
    return values
