"""Hands the rows of lookups from the leader of a tensor group to its other ranks, within forward and backward.

    leader:   lookup ── rows ──┬──────────────> tower         backward: gradient ── noted ── staged by the lookup's op
    follower:                  └── broadcast ─> tower         backward: gradient ── noted, for the comparison of ranks

The rows cross as one float32 buffer whose last element is the number of the leader's error, 0 without one.
The buffer of a forward has the rows of all lookups that joint_plan.py knows before it. Where the leader has no rows for
one of them, and for other lookups, each lookup has a buffer of its own.
So an error of the leader's lookup ends the forward on every rank of the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...proto.errors import FailedPrecondition, Internal, SparserowError, error_of, typed_error
from ..data.batch_tensors import tensors_of
from ..session.join import collective_device
from ..session.session import Session
from ..session.tensor_group import TensorGroup
from .current_forward import joint_forward

if TYPE_CHECKING:
    from .embedding import DistributedLayer
    from .joint_plan import Arguments, Lookup

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's multiplier of Fibonacci hashing (Knuth, vol. 3, 6.4)


def handed_rows(layer: DistributedLayer, arguments: Arguments) -> Tensor:
    """Returns the rows of one lookup on every rank of the layer's tensor group.

    Args:
        layer: the layer that is called.
        arguments: the arguments of the call.

    Raises:
        SparserowError: the lookup failed on the leader.
    """
    joint, group = joint_forward(), layer.tensor_group
    assert group is not None
    made: Tensor | None = None if joint is None else joint.take(layer, arguments)
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


def hand_all(group: TensorGroup, lookups: Sequence[Lookup]) -> list[Tensor] | None:
    """Returns the rows of lookups on every rank of the group, by one broadcast.

    Args:
        group: the tensor group.
        lookups: the same on every rank.

    Returns:
        The rows of each lookup; None on every rank where one failed on the leader, or their layers are on several
        devices. The layers then make their lookups by themselves, and the one that fails tells it.
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


def _anchor_of(layer: DistributedLayer) -> Tensor:
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


class SameBatch:
    """A hook before each forward that refuses a batch that is not the same on every rank of the tensor group.

    Copies of the model share this object. A pickled copy has a hook that does nothing.

    Args:
        group: the tensor group.

    Attributes:
        plan_of: returns a number for a batch, 0 or the digest of this rank's plan of its lookups.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._has_agreed = False
        self.plan_of: Callable[[Any], int] = lambda _: 0

    def install(self, model: nn.Module) -> None:
        """Adds the hook to the root module of the model."""
        model.register_forward_pre_hook(self.before, with_kwargs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> SameBatch:
        return self

    def __reduce__(self) -> tuple[type[_AnyBatch], tuple[()]]:
        return _AnyBatch, ()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares the forward's arguments and plans over the ranks of the group; a compiled forward does not.

        Raises:
            FailedPrecondition: they differ; every rank of the group raises it.
        """
        del module
        self._has_agreed = False
        if torch.compiler.is_compiling():
            return
        tensors = [tensor for _, tensor in tensors_of((args, kwargs))]
        hashes = [_hash(tensor).cpu() for tensor in tensors] or [torch.zeros((), dtype=torch.int64)]
        digest = self.plan_of((args, kwargs))
        mine = torch.stack([_hash(torch.stack(hashes)), torch.tensor(digest)]).to(collective_device())
        batches, plans = zip(*(each.tolist() for each in self._group.gathered(mine)), strict=True)
        self._has_agreed = digest != 0 and len(set(plans)) == 1
        if len(set(batches)) > 1:
            self._has_agreed = False
            self._group.forget()
            raise FailedPrecondition(
                "forward: the ranks of a tensor group have different batches; all of them read the same one, so a "
                "sampler or reader counts tensor groups (session.rank, session.world_size) and not ranks"
            )

    def take_agreement(self) -> bool:
        """Returns, once, whether the ranks have one plan for the forward that begins."""
        has_agreed, self._has_agreed = self._has_agreed, False
        return has_agreed


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


def hand_rows(model: nn.Module, session: Session) -> SameBatch | None:
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
