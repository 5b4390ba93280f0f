"""The plan of a model's joint lookups: which layers look which parts of the batch up, learnt from a traced forward.

A lookup is joint when several ranks make it together: those of a tensor group, or all of them where its table is on
their devices. The plan names the arguments of each lookup as expressions of the forward's arguments, so that ranks
find the arguments of all lookups before the forward begins. Ranks compare the digests of their plans.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ..data.batch_tensors import Path, tensors_of
from ..id_trace.forward_trace import ForwardTrace
from ..id_trace.id_expressions import Derived, Expression, Root, Values, has_sizes, text_of
from .rows_ahead import INFERENCE, holds

if TYPE_CHECKING:
    from .embedding import DistributedLayer

_DIGEST_BYTES = 7  # so that a digest is a positive int64, and one in place of an exchange's number stays one
_LEAST_LOOKUPS = 2

# The ids, the offsets and the weights of a lookup; None: it has none.
Arguments: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Lookup:
    """A lookup whose arguments were found before the forward.

    Attributes:
        layer: the layer that will be called.
        arguments: the arguments of the call.
    """

    layer: DistributedLayer
    arguments: Arguments

    @property
    def ids(self) -> Tensor:
        """The ids."""
        return self.arguments[0]


@dataclass(frozen=True)
class _Planned:
    layer: weakref.ref[DistributedLayer]
    binding: str
    arguments: tuple[Expression | None, ...]

    @property
    def expressions(self) -> Iterator[Expression]:
        return (expression for expression in self.arguments if expression is not None)

    @property
    def text(self) -> str:
        arguments = ["" if expression is None else text_of(expression) for expression in self.arguments]
        return "\n".join([self.binding, *arguments])


class LookupTrace:
    """Notes the joint lookups of a traced forward, in their order.

    Args:
        trace: the trace of the forward.
        batch: the arguments of the forward.
    """

    def __init__(self, trace: ForwardTrace, batch: Any) -> None:
        self._trace = trace
        self._tensors = list(tensors_of(batch))
        self.planned: list[_Planned] = []

    def note(self, layer: DistributedLayer, arguments: Arguments) -> None:
        """Notes a lookup, unless one of its arguments is not known from those of the forward."""
        found: list[Expression | None] = []
        for tensor in arguments:
            expression = None if tensor is None else self._expression_of(tensor)
            if expression is None and tensor is not None:
                return
            found.append(expression)
        self.planned.append(_Planned(weakref.ref(layer), layer.binding, tuple(found)))

    def _expression_of(self, tensor: Tensor) -> Expression | None:
        """Returns the expression of a tensor: that of the trace, or a part of the batch that has the same memory.

        The trace follows neither subclasses of Tensor nor the views that a compiled graph makes.
        """
        traced = self._trace.expression_of(tensor)
        if traced is not None:
            return traced
        parts = (_part_of(path, root, tensor) for path, root in self._tensors)
        return next((part for part in parts if part is not None), None)


class JointPlan:
    """The joint lookups of a forward.

    Args:
        trace: the lookups of a traced forward.
        batch: the arguments of that forward.

    Attributes:
        digest: a number above 0 that ranks with the same plan share; 0 for a plan of fewer than two lookups.
    """

    def __init__(self, trace: LookupTrace, batch: Any) -> None:
        self._planned = trace.planned
        every = [expression for planned in self._planned for expression in planned.expressions]
        self._shapes = _shapes_of(batch) if any(map(has_sizes, every)) else None
        self.digest = 0
        if len(self._planned) >= _LEAST_LOOKUPS:
            text = "\n".join(planned.text for planned in self._planned).encode()
            self.digest = 1 + int.from_bytes(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest(), "little")

    def find(self, batch: Any, *, same_shapes: bool) -> list[Lookup] | None:
        """Returns the lookups of a batch; None when one of them does not fit it.

        Args:
            batch: the arguments of the forward.
            same_shapes: whether a plan with sizes fits batches with the shapes of the traced one alone. Ranks need it
                whose batches differ: a bound may be a size of the batch, and then holds on some of them.
        """
        if same_shapes and self._shapes is not None and self._shapes != _shapes_of(batch):
            return None
        values, found = Values(batch, _itself), []
        with torch.no_grad():
            for planned in self._planned:
                layer = planned.layer()
                ids, offsets, weights = (None if each is None else values.of(each) for each in planned.arguments)
                is_found = [each is not None for each in (ids, offsets, weights)]
                if layer is None or ids is None or is_found != [each is not None for each in planned.arguments]:
                    return None
                found.append(Lookup(layer, (ids, offsets, weights)))
        return found


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _shapes_of(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for _, tensor in tensors_of(batch)]


def _part_of(path: Path, root: Tensor, tensor: Tensor) -> Expression | None:
    """Returns the expression of a tensor that is a whole, one index or one range of a tensor of the batch."""
    if tensor.dtype != root.dtype or tensor.device != root.device or root.layout != torch.strided or not root.numel():
        return None
    if tensor.is_set_to(root):
        return Root(path)
    ahead = tensor.storage_offset() - root.storage_offset()
    for dim, (size, stride) in enumerate(zip(root.shape, root.stride(), strict=True)):
        first = ahead // stride if stride else 0
        if not 0 <= first < size:
            continue
        if tensor.dim() == root.dim() - 1 and tensor.is_set_to(root.select(dim, first)):
            return Derived(Root(path), partial(torch.select, dim=dim, index=first), text=f"select {dim} {first}")
        length = tensor.shape[dim] if tensor.dim() == root.dim() else size + 1
        if first + length <= size and tensor.is_set_to(root.narrow(dim, first, length)):
            narrow = partial(torch.narrow, dim=dim, start=first, length=length)
            return Derived(Root(path), narrow, text=f"narrow {dim} {first} {length}", has_sizes=True)
    return None


def same_arguments(given: Sequence[Tensor | None], made: Sequence[tuple[Tensor, int] | None]) -> bool:
    """Returns whether arguments have the values that others had when a lookup was made of them.

    Values on a device are not compared, since that would wait for it; there only the same memory counts.

    Args:
        given: the arguments of a call.
        made: the arguments of the lookup with their versions at that time; see :func:`version_of`.
    """
    return all(
        tensor is None if other is None else tensor is not None and holds(tensor, *other)
        for tensor, other in zip(given, made, strict=True)
    )


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place; INFERENCE for one whose changes torch does not count."""
    return INFERENCE if tensor.is_inference() else tensor._version
