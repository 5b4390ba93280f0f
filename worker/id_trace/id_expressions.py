"""Expressions for ids: views, casts and arithmetic, with constant arguments, of a tensor of the batch.

A traced forward (worker/id_trace/forward_trace.py) makes these expressions. They are guesses about later batches.
An expression that does not fit a batch has no value there, and the lookup then pulls its rows itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...cpp_ext import _client
from ..data.batch_tensors import (
    Description,
    Path,
    address_of,
    can_hold_ids,
    description,
    on_host,
    tensor_at,
    tensors_of,
)

Operation: TypeAlias = Callable[[Tensor], Any]

_MISFITS = (RuntimeError, IndexError, TypeError, ValueError)
_NOWHERE = (None, None)
_UNDESCRIBED = description(None, None)


@dataclass(frozen=True)
class Root:
    """An expression for a tensor of the batch itself.

    Attributes:
        path: the tensor's path in the batch.
    """

    path: Path


@dataclass(frozen=True, eq=False)
class Derived:
    """An expression for the result of an operation on another expression's value.

    Attributes:
        source: the expression to whose value the operation is applied.
        operation: a view, a cast, or arithmetic with constants.
        output: the index of the result when the operation returns several tensors; None when it returns one.
        text: the operation with its arguments, the same in every process.
        has_sizes: whether its arguments have sizes or bounds, which may be those of the traced batch.
    """

    source: Expression
    operation: Operation
    output: int | None = None
    text: str = ""
    has_sizes: bool = False


Expression: TypeAlias = Root | Derived


def text_of(expression: Expression) -> str:
    """Returns an expression as text; processes that trace the same forward have the same text."""
    if isinstance(expression, Root):
        return repr(expression.path)
    return f"{text_of(expression.source)} {expression.text} {expression.output}"


def has_sizes(expression: Expression) -> bool:
    """Returns whether an expression has sizes or bounds, which may be those of the traced batch."""
    return isinstance(expression, Derived) and (expression.has_sizes or has_sizes(expression.source))


@dataclass(frozen=True, eq=False)
class Fixed:
    """Ids that every batch has, such as those of the rows of a dense tower.

    Attributes:
        ids: the ids, on the host; a lookup is given this tensor itself.
    """

    ids: Tensor


@dataclass(frozen=True)
class TracedIds:
    """The ids of a lookup in a traced forward.

    Attributes:
        ids: the ids that the lookup was given.
        expression: the expression of the ids in terms of the forward's arguments.
        root: the tensor of the arguments at the root of the expression.
    """

    ids: Tensor
    expression: Expression
    root: Tensor


# Gives the values of a tensor on the host, with its strides; None where a copy has others.
HostCopy: TypeAlias = Callable[[Tensor], Tensor | None]


class Values:
    """Computes values of expressions for one batch on the host; common parts are computed once.

    Args:
        batch: the batch, anywhere.
        host_of: gives the values of its tensors on the host.
    """

    def __init__(self, batch: Any, host_of: HostCopy) -> None:
        self._batch, self._host_of = batch, host_of
        self._roots: dict[Path, Tensor | None] = {}
        self._values: dict[Derived, Tensor | None] = {}

    def of(self, expression: Expression) -> Tensor | None:
        """Returns the value of an expression, on the host; None when the expression does not fit the batch."""
        if isinstance(expression, Root):
            if expression.path not in self._roots:
                root = tensor_at(self._batch, expression.path)
                self._roots[expression.path] = None if root is None else self._host_of(root.detach())
            return self._roots[expression.path]
        if expression not in self._values:
            source = self.of(expression.source)
            self._values[expression] = None if source is None else _value_of(expression, source)
        return self._values[expression]


def _value_of(expression: Derived, source: Tensor) -> Tensor | None:
    try:
        made = expression.operation(source)
        value = made if expression.output is None else made[expression.output]
    except _MISFITS:
        return None
    return value if isinstance(value, Tensor) else None


class IdSources:
    """A plan of merged lookups, with the expressions of the tensors to which it refers.

    Args:
        trace: the lookups of a traced forward.
        traced: pairs of an expression and its tensor in that forward. When two explain a lookup, the earlier is used.

    Attributes:
        plan: the plan.
    """

    def __init__(self, trace: _client.LookupTrace, traced: Sequence[tuple[Expression | Fixed, Tensor]]) -> None:
        self.plan = _client.learn_merge(trace, [description(tensor, tensor) for _, tensor in traced])
        used = set(self.plan.roots)
        self._sources = [(index, expression) for index, (expression, _) in enumerate(traced) if index in used]
        self._size = len(traced)

    def tensors(self, batch: Any, host_of: HostCopy = on_host) -> list[tuple[Tensor | None, Tensor | None]]:
        """Returns, for each expression, the tensor as the lookups see it and the same tensor on the host.

        Both are None when the plan does not use the expression, or when it does not fit the batch.

        Args:
            batch: the batch as the forward will see it.
            host_of: gives the values of its tensors on the host; the default copies those that are not there.
        """
        values = Values(batch, host_of)
        tensors: list[tuple[Tensor | None, Tensor | None]] = [_NOWHERE] * self._size
        with torch.no_grad():
            for index, source in self._sources:
                tensors[index] = self._tensor(source, values, batch, host_of)
        return tensors

    @staticmethod
    def _tensor(
        source: Expression | Fixed, values: Values, batch: Any, host_of: HostCopy
    ) -> tuple[Tensor | None, Tensor | None]:
        if isinstance(source, Fixed):
            return source.ids, source.ids
        if isinstance(source, Root):
            seen = _ids(tensor_at(batch, source.path))
            return _NOWHERE if seen is None else (seen, host_of(seen))
        ids = _ids(values.of(source))
        return ids, ids


def descriptions(tensors: Sequence[tuple[Tensor | None, Tensor | None]]) -> list[Description]:
    """Returns the descriptions that the native half needs; the tensors must live until it has read them."""
    return [_UNDESCRIBED if seen is None and host is None else description(seen, host) for seen, host in tensors]


def _ids(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is not None and can_hold_ids(tensor) else None


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
    rebased: dict[Expression, Expression] = {}
    found = []
    for ids in traced:
        if id(ids.root) not in roots:
            roots[id(ids.root)] = _root_in(tensors, ids.root)
        root = roots[id(ids.root)]
        if root is not None:
            found.append((_rebase(ids.expression, root, rebased), ids.ids))
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
    """Returns the expression with another root; common parts stay common.

    Args:
        expression: the expression to convert.
        root: the new root.
        rebased: the results so far for this batch, which is extended.
    """
    if isinstance(expression, Root):
        return rebased.setdefault(expression, root)
    if expression not in rebased:
        source = _rebase(expression.source, root, rebased)
        rebased[expression] = replace(expression, source=source)
    return rebased[expression]
