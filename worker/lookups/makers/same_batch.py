"""Compares, before each forward, the batches and the plans of the ranks of a tensor group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....proto.errors import FailedPrecondition
from ...data.batch_tensors import tensors_of
from ...session.join import collective_device
from ...session.tensor_group import TensorGroup

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's multiplier of Fibonacci hashing (Knuth, vol. 3, 6.4)


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
