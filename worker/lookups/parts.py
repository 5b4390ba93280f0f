"""Finds a tensor in the memory of others: it is one of them, one index of a dimension, or a range of one.

Views that no trace follows are known so, such as those of a compiled graph or of a subclass of Tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.batch_tensors import address_of
from .expressions import Expression, Slice


class Memory(NamedTuple):
    """Where a tensor lies.

    Attributes:
        address: of its first element, on whichever side of the bus it lies; 0: it has no memory.
        sizes: of its dimensions.
        strides: of its dimensions, in elements.
        item_bytes: of an element.
    """

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int


def memory_of(tensor: Tensor) -> Memory:
    """Returns where a tensor lies; a tensor that is not strided has no memory."""
    if tensor.layout != torch.strided:
        return Memory(0, (), (), 1)
    return Memory(address_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.element_size())


def expression_in(memory: Memory, known: Sequence[tuple[Expression, Memory]]) -> Expression | None:
    """Returns the expression of a tensor that is one of those that are known, or a part of one; None: it is none.

    Args:
        memory: of the tensor.
        known: expressions with the memory of their values; the first that explains the tensor is taken.
    """
    for expression, whole in known:
        ahead = memory.address - whole.address
        if not whole.address or memory.item_bytes != whole.item_bytes or ahead < 0 or ahead % memory.item_bytes:
            continue
        if ahead == 0 and _is_same(memory, whole.sizes, whole.strides):
            return expression
        part = _part_at(expression, memory, whole, ahead // memory.item_bytes)
        if part is not None:
            return part
    return None


def _part_at(expression: Expression, memory: Memory, whole: Memory, ahead: int) -> Slice | None:
    """Returns the part of a tensor that begins ``ahead`` elements after it; None: there is none of this shape."""
    for dim, (size, stride) in enumerate(zip(whole.sizes, whole.strides, strict=True)):
        start, rest = divmod(ahead, stride) if stride > 0 else (0, ahead)
        if rest or start >= size:
            continue
        sizes, strides = list(whole.sizes), list(whole.strides)
        if len(memory.sizes) == len(sizes):
            length = sizes[dim] = memory.sizes[dim]
            if start + length <= size and _is_same(memory, sizes, strides):
                return Slice(expression, dim, start, length)
        del sizes[dim], strides[dim]
        if _is_same(memory, sizes, strides):
            return Slice(expression, dim, start)
    return None


def _is_same(memory: Memory, sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor has these sizes, and these strides where they matter."""
    if len(memory.sizes) != len(sizes):
        return False
    dimensions = zip(memory.sizes, sizes, memory.strides, strides, strict=True)
    return all(has == size and (size <= 1 or step == stride) for has, size, step, stride in dimensions)
