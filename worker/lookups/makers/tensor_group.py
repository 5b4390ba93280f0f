"""Hands the rows of lookups from the leader of a tensor group to its other ranks, within forward and backward.

    leader:   lookup ── rows ──┬──────────────> tower         backward: gradient ── noted ── staged by the lookup's op
    follower:                  └── broadcast ─> tower         backward: gradient ── noted, for the comparison of ranks

The rows cross as one float32 buffer whose last element is the number of the leader's error, 0 without one.
The buffer of a forward has the rows of all lookups that joint.py finds before it. Where the leader has no rows for
one of them, and for other lookups, each lookup has a buffer of its own.
So an error of the leader's lookup ends the forward on every rank of the group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....proto.errors import Internal, SparserowError, error_of, typed_error
from ...session.session import JobSession
from ...session.tensor_group import TensorGroup
from ..made_rows import take_joint
from ..plan import Arguments
from ..planned_layer import PlannedLayer
from .same_batch import SameBatch


@dataclass(frozen=True)
class LookupCall:
    """A lookup whose arguments were found before the forward.

    Attributes:
        layer: the layer that will be called.
        arguments: the arguments of the call.
    """

    layer: PlannedLayer
    arguments: Arguments


def handed_rows(layer: PlannedLayer, arguments: Arguments) -> Tensor:
    """Returns the rows of one lookup on every rank of the layer's tensor group.

    Args:
        layer: the layer that is called.
        arguments: the arguments of the call.

    Raises:
        SparserowError: the lookup failed on the leader.
    """
    group = layer.tensor_group
    assert group is not None
    made: Tensor | None = take_joint(layer, arguments)
    if made is not None:
        return made
    shape = layer.shape_of(*arguments)
    buffer = torch.empty(math.prod(shape) + 1, device=layer.anchor.device)
    number = group.next_lookup()
    if not group.leads:
        group.broadcast(buffer)
        code = int(buffer[-1])
        if code:
            raise error_of(
                code,
                f"table {layer.binding!r}: the lookup failed on rank {group.leader}, which leads this tensor group and "
                "shows the error",
            )
        taken: Tensor = _Taken.apply(_anchor_of(layer), buffer[:-1].view(*shape), group, number)
        return taken
    try:
        rows = layer.look_up(*arguments)
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


def hand_all(group: TensorGroup, lookups: Sequence[LookupCall]) -> list[Tensor] | None:
    """Returns the rows of lookups on every rank of the group, by one broadcast.

    Args:
        group: the tensor group.
        lookups: the same on every rank.

    Returns:
        The rows of each lookup; None on every rank where one failed on the leader, or their layers are on several
        devices. The layers then make their lookups by themselves, and the one that fails raises.
    """
    device = lookups[0].layer.anchor.device
    if any(lookup.layer.anchor.device != device for lookup in lookups):
        return None
    shapes = [lookup.layer.shape_of(*lookup.arguments) for lookup in lookups]
    buffer = torch.empty(sum(map(math.prod, shapes)) + 1, device=device)
    if group.leads:
        rows: list[Tensor] | None = None
        try:
            rows = [lookup.layer.look_up(*lookup.arguments) for lookup in lookups]
            torch.cat([each.detach().reshape(-1) for each in rows], out=buffer[:-1])
        except Exception:
            rows = None
        buffer[-1] = 0 if rows is not None else Internal.number
        group.broadcast(buffer)
        return None if rows is None else [_Given.apply(each, group, group.next_lookup()) for each in rows]
    group.broadcast(buffer)
    if int(buffer[-1]):
        return None
    parts = buffer[:-1].split(list(map(math.prod, shapes)))
    return [
        _Taken.apply(_anchor_of(lookup.layer), part.view(*shape), group, group.next_lookup())
        for lookup, part, shape in zip(lookups, parts, shapes, strict=True)
    ]


def _anchor_of(layer: PlannedLayer) -> Tensor:
    return layer.anchor if layer.is_trained else layer.anchor.detach()


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


def hand_rows(model: nn.Module, session: JobSession) -> SameBatch | None:
    """Makes a distributed model one of the session's tensor group; without a group it does nothing.

    Returns:
        The hook that was added to the model; None without a group.
    """
    group = session.core.tensor_group
    if group is None:
        return None
    group.hand = torch.compiler.disable(handed_rows)  # a compiled graph has no collective calls of ours
    for module in model.modules():
        if hasattr(module, "tensor_group"):
            vars(module)["tensor_group"] = group
    same_batch = SameBatch(group)
    same_batch.install(model)
    return same_batch


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
