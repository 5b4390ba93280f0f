"""Expressions for ids: views, casts and arithmetic, with constant arguments, of a tensor of the batch.

A traced forward (trace.py) makes these expressions. They are guesses about later batches.
An expression that does not fit a batch has no value there, and the lookup then pulls its rows itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from ..data.batch_tensors import Path, tensor_at

Operation: TypeAlias = Callable[[Tensor], Any]

_MISFITS = (RuntimeError, IndexError, TypeError, ValueError)


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


@dataclass(frozen=True)
class Slice:
    """An expression for one index, or one range, of one dimension of another expression's value.

    Attributes:
        source: the expression of the whole.
        dim: the dimension.
        start: the index, or the first of the range.
        length: how many indexes the range has, as in the traced batch; None: it is one index, without the dimension.
    """

    source: Expression
    dim: int
    start: int
    length: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Returns the part of a tensor.

        Raises:
            RuntimeError, IndexError: the tensor has no such part.
        """
        if self.length is None:
            return whole.select(self.dim, self.start)
        return whole.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True, eq=False)
class Fixed:
    """Ids that every batch has, such as those of the rows of a dense tower.

    Attributes:
        ids: the ids, on the host; a lookup is given this tensor itself.
    """

    ids: Tensor


Expression: TypeAlias = Root | Derived | Slice | Fixed


def text_of(expression: Expression) -> str:
    """Returns an expression as text; processes that trace the same forward have the same text."""
    if isinstance(expression, Root):
        return repr(expression.path)
    if isinstance(expression, Slice):
        return f"{text_of(expression.source)} part {expression.dim} {expression.start} {expression.length}"
    if isinstance(expression, Derived):
        return f"{text_of(expression.source)} {expression.text} {expression.output}"
    return f"fixed {expression.ids.tolist()}"


def is_part(expression: Expression) -> bool:
    """Returns whether an expression is a tensor of the batch, or a part of one."""
    return isinstance(expression, Root) or (isinstance(expression, Slice) and is_part(expression.source))


def part_of(batch: Any, expression: Expression) -> Tensor | None:
    """Returns a tensor of the batch, or a part of one, where it lies; None where the batch has none.

    Args:
        batch: the batch.
        expression: one that :func:`is_part`.
    """
    if isinstance(expression, Root):
        return tensor_at(batch, expression.path)
    assert isinstance(expression, Slice)
    source = part_of(batch, expression.source)
    return None if source is None else _value_of(expression, source)


def has_sizes(expression: Expression) -> bool:
    """Returns whether an expression has sizes or bounds, which may be those of the traced batch."""
    if isinstance(expression, Slice):
        return expression.length is not None or has_sizes(expression.source)
    return isinstance(expression, Derived) and (expression.has_sizes or has_sizes(expression.source))


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
        self._values: dict[Derived | Slice, Tensor | None] = {}

    def of(self, expression: Expression) -> Tensor | None:
        """Returns the value of an expression, on the host; None when the expression does not fit the batch."""
        if isinstance(expression, Root):
            if expression.path not in self._roots:
                root = tensor_at(self._batch, expression.path)
                self._roots[expression.path] = None if root is None else self._host_of(root.detach())
            return self._roots[expression.path]
        if isinstance(expression, Fixed):
            return expression.ids
        if expression not in self._values:
            source = self.of(expression.source)
            self._values[expression] = None if source is None else _value_of(expression, source)
        return self._values[expression]


def _value_of(expression: Derived | Slice, source: Tensor) -> Tensor | None:
    try:
        if isinstance(expression, Slice):
            return expression.of(source)
        made = expression.operation(source)
        value = made if expression.output is None else made[expression.output]
    except _MISFITS:
        return None
    return value if isinstance(value, Tensor) else None
