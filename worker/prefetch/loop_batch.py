"""Expresses ids in terms of the training loop's batch that a traced forward knows in terms of its own arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.batch_tensors import Path, address_of, tensors_of
from ..lookups.expressions import Derived, Expression, Fixed, Root, TracedIds


def in_batch(traced: Sequence[TracedIds], batch: Any) -> list[tuple[Expression, Tensor]]:
    """Converts expressions in terms of a forward's arguments into expressions in terms of the loop's batch.

    Ids whose root is not a tensor of the batch are left out.

    Args:
        traced: traced ids, whose roots are arguments of the forward.
        batch: the batch that the training loop got for this forward.

    Returns:
        Pairs of an expression and the ids.
    """
    tensors = list(tensors_of(batch))
    roots: dict[int, Expression | None] = {}
    # By root, because the forwards of a batch have equal expressions of different arguments.
    rebased: dict[int, dict[Expression, Expression]] = {}
    found = []
    for ids in traced:
        name = id(ids.root)
        if name not in roots:
            roots[name] = _root_in(tensors, ids.root)
        root = roots[name]
        if root is not None:
            found.append((_rebase(ids.expression, root, rebased.setdefault(name, {})), ids.ids))
    return found


def _root_in(tensors: Sequence[tuple[Path, Tensor]], argument: Tensor) -> Expression | None:
    """Finds an argument among the tensors of a batch; returns None when it is not there.

    Tensors are compared first by memory and then by values, since the loop may have moved or cast the batch.
    """
    for path, tensor in tensors:
        if tensor.layout == torch.strided and _is_same_memory(tensor, argument):
            return Root(path)
    for path, tensor in tensors:
        if tensor.layout == torch.strided and tensor.shape == argument.shape and _is_cast(tensor, argument):
            return Derived(Root(path), partial(Tensor.to, dtype=argument.dtype), text=f"to {argument.dtype}")
    return None


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    same = (one.device, one.dtype, one.shape, one.stride()) == (other.device, other.dtype, other.shape, other.stride())
    return same and one.numel() > 0 and address_of(one) == address_of(other)


def _is_cast(tensor: Tensor, argument: Tensor) -> bool:
    with torch.no_grad():
        cast = tensor.to(argument)
        return argument.numel() > 0 and bool(((cast == argument) | ((cast != cast) & (argument != argument))).all())


def _rebase(expression: Expression, root: Expression, rebased: dict[Expression, Expression]) -> Expression:
    """Returns the expression with another root; common parts, which ``rebased`` collects for that root, stay common."""
    if isinstance(expression, Root | Fixed):
        return rebased.setdefault(expression, root)
    if expression not in rebased:
        source = _rebase(expression.source, root, rebased)
        rebased[expression] = replace(expression, source=source)
    return rebased[expression]
