"""Hands the rows of a lookup from the leader of a tensor group to its other ranks, within forward and backward.

    leader:   lookup ── rows ──┬──────────────> tower         backward: gradient ── noted ── staged by the lookup's op
    follower:                  └── broadcast ─> tower         backward: gradient ── noted, for the comparison of ranks

The rows of a lookup cross as one float32 buffer whose last element is the number of the leader's error, 0 without one.
So an error of the leader's lookup ends the forward on every rank of the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...proto.errors import FailedPrecondition, Internal, SparserowError, error_of, typed_error
from ..data.batch_tensors import tensors_of
from ..session.join import collective_device
from ..session.session import Session
from ..session.tensor_group import TensorGroup

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's multiplier of Fibonacci hashing (Knuth, vol. 3, 6.4)


def handed_rows(
    group: TensorGroup, look_up: Callable[[], Tensor], shape: Sequence[int], *, table: str, anchor: Tensor
) -> Tensor:
    """Returns the rows of one lookup on every rank of the group.

    Args:
        group: the tensor group.
        look_up: the lookup, which the leader makes; it returns float32 of ``shape``.
        shape: the shape of the rows.
        table: the name of the table, for error texts.
        anchor: a tensor on the device of the rows; with a gradient when the lookup has one.

    Raises:
        SparserowError: the lookup failed on the leader.
    """
    buffer = torch.empty(math.prod(shape) + 1, device=anchor.device)
    number = group.next_lookup()
    if not group.leads:
        group.broadcast(buffer)
        code = int(buffer[-1])
        if code:
            raise error_of(
                code,
                f"table {table!r}: the lookup failed on rank {group.leader}, which leads this tensor group and shows "
                "the error",
            )
        taken: Tensor = _Taken.apply(anchor, buffer[:-1].view(*shape), group, number)
        return taken
    try:
        rows = look_up()
    except Exception as error:
        shown = typed_error(error)
        buffer[-1] = shown.number if isinstance(shown, SparserowError) else Internal.number
        group.broadcast(buffer)
        raise
    buffer[:-1].copy_(rows.detach().reshape(-1))
    buffer[-1] = 0
    group.broadcast(buffer)
    given: Tensor = _Given.apply(rows, group, number)
    return given


class _Given(torch.autograd.Function):
    """The leader's rows, whose gradient is noted on its way to the lookup."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: TensorGroup, number: int) -> Tensor:
        ctx.group, ctx.number = group, number
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.group.note(ctx.number, grads[0])
        return grads[0], None, None


class _Taken(torch.autograd.Function):
    """A follower's rows, whose gradient is noted and ends here."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, group: TensorGroup, number: int) -> Tensor:
        del anchor
        ctx.group, ctx.number = group, number
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.group.note(ctx.number, grads[0])
        return None, None, None, None


class SameBatch:
    """A hook before each forward that refuses a batch that is not the same on every rank of the tensor group.

    Copies of the model share this object. A pickled copy has a hook that does nothing.

    Args:
        group: the tensor group.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> SameBatch:
        return self

    def __reduce__(self) -> tuple[type[_AnyBatch], tuple[()]]:
        return _AnyBatch, ()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares the arguments of the forward over the ranks of the group; a compiled forward does not.

        Raises:
            FailedPrecondition: they differ; every rank of the group raises it.
        """
        del module
        if torch.compiler.is_compiling():
            return
        tensors = [tensor for _, tensor in tensors_of((args, kwargs))]
        hashes = [_hash(tensor).cpu() for tensor in tensors] or [torch.zeros((), dtype=torch.int64)]
        mine = _hash(torch.stack(hashes)).to(collective_device()).reshape(1)
        if len({int(each) for each in self._group.gathered(mine)}) > 1:
            self._group.forget()
            raise FailedPrecondition(
                "forward: the ranks of a tensor group have different batches; all of them read the same one, so a "
                "sampler or reader counts tensor groups (session.rank, session.world_size) and not ranks"
            )


class _AnyBatch:
    """Replaces the hook in a pickled copy of a model."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Does nothing."""


def _hash(tensor: Tensor) -> Tensor:
    """Returns () int64: a hash of the values, their order and the shape."""
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point():
        flat = flat.double().view(torch.int64)
    places = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.int64)
    shape = sum((index + 3) * size for index, size in enumerate(tensor.shape))
    return ((flat.to(torch.int64) ^ (flat.to(torch.int64) >> 29)) * (places * _ODD)).sum() + shape


def hand_rows(model: nn.Module, session: Session) -> None:
    """Makes a distributed model one of the session's tensor group; without a group it does nothing."""
    group = session.core.tensor_group
    if group is None:
        return
    group.hand = torch.compiler.disable(handed_rows)  # a compiled graph has no collective calls of ours
    for module in model.modules():
        if hasattr(module, "tensor_group"):
            vars(module)["tensor_group"] = group
    model.register_forward_pre_hook(SameBatch(group).before, with_kwargs=True)


def without_group(model: nn.Module) -> nn.Module:
    """Returns the distributed model itself, after making it one whose lookups no other rank takes part in."""
    for module in model.modules():
        if hasattr(module, "tensor_group"):
            vars(module)["tensor_group"] = None
    for number, hook in tuple(model._forward_pre_hooks.items()):
        if isinstance(getattr(hook, "__self__", None), SameBatch):
            del model._forward_pre_hooks[number]
            model._forward_pre_hooks_with_kwargs.pop(number, None)
    return model
