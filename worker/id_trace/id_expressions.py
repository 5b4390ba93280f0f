"""Ids as a batch explains them: views and casts of one of its tensors, with constant arguments.

A traced forward (worker/id_trace/forward_trace.py) makes these expressions. They are guesses about later batches.
An expression that does not fit a batch has no value there, and the lookup then pulls for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...cpp_ext import _client
from ..data.batch_tensors import (
    Description,
    Path,
    can_hold_ids,
    description,
    on_host,
    tensor_at,
    tensors_of,
)

Operation: TypeAlias = Callable[[Tensor], Any]

_MISFITS = (RuntimeError, IndexError, TypeError, ValueError)


@dataclass(frozen=True)
class Root:
    """A tensor of the batch, as it is."""

    path: Path


@dataclass(frozen=True, eq=False)
class Derived:
    """What an operation makes of another expression's value.

    Attributes:
        source: what the operation is applied to.
        operation: a view or a cast.
        output: which of its tensors, where it makes several.
    """

    source: Expression
    operation: Operation
    output: int | None = None


Expression: TypeAlias = Root | Derived


@dataclass(frozen=True)
class TracedIds:
    """Ids of a lookup in a traced forward.

    Attributes:
        ids: the tensor that the lookup was given.
        expression: what it is of the forward's arguments.
        root: that tensor of the arguments.
    """

    ids: Tensor
    expression: Expression
    root: Tensor


class Values:
    """Values of expressions for one batch on the host; common parts are computed once."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self._roots: dict[Path, Tensor | None] = {}
        self._values: dict[Derived, Tensor | None] = {}

    def of(self, expression: Expression) -> Tensor | None:
        """The tensor, on the host; None where this batch has no such part."""
        if isinstance(expression, Root):
            if expression.path not in self._roots:
                root = tensor_at(self._host, expression.path)
                self._roots[expression.path] = None if root is None else root.detach().cpu()
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
    """A plan, and where the tensors that it speaks of come from in a batch.

    Args:
        trace: the lookups of a traced forward.
        traced: (expression, tensor of that forward); the earlier one is taken where two explain a lookup.
    """

    def __init__(self, trace: _client.LookupTrace, traced: Sequence[tuple[Expression, Tensor]]) -> None:
        self.plan = _client.learn_merge(trace, [description(tensor, tensor) for _, tensor in traced])
        used = set(self.plan.roots)
        self._sources = [expression if index in used else None for index, (expression, _) in enumerate(traced)]

    def tensors(self, batch: Any, host: Any | None) -> list[tuple[Tensor | None, Tensor | None]]:
        """Of each source the tensor as the lookups see it, and the same on the host; Nones where there is none.

        Args:
            batch: as the forward will see it.
            host: the same on the host; None: what is used is copied there.
        """
        values = Values(batch if host is None else host)
        with torch.no_grad():
            return [self._tensor(source, values, batch, host) for source in self._sources]

    @staticmethod
    def _tensor(
        source: Expression | None, values: Values, batch: Any, host: Any | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if isinstance(source, Root):
            seen = _ids(tensor_at(batch, source.path))
            if seen is None:
                return None, None
            return seen, on_host(seen) if host is None else _ids(tensor_at(host, source.path))
        ids = None if source is None else _ids(values.of(source))
        return ids, ids


def descriptions(tensors: Sequence[tuple[Tensor | None, Tensor | None]]) -> list[Description]:
    """What the native half needs; the tensors must live until it has read them."""
    return [description(seen, host) for seen, host in tensors]


def _ids(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is not None and can_hold_ids(tensor) else None


def in_batch(traced: Sequence[TracedIds], batch: Any) -> list[tuple[Expression, Tensor]]:
    """Ids of a forward as expressions of the batch that the loop was given; those that it does not explain are left.

    Args:
        traced: their roots are arguments of the forward.
        batch: of this very forward.
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
    """The same memory; then the same values, since the loop may have moved or cast the batch."""
    for path, tensor in tensors:
        if tensor.layout == torch.strided and _is_same_memory(tensor, argument):
            return Root(path)
    for path, tensor in tensors:
        if tensor.layout == torch.strided and tensor.shape == argument.shape and _is_cast(tensor, argument):
            return Derived(Root(path), partial(Tensor.to, dtype=argument.dtype))
    return None


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    same = (one.device, one.dtype, one.shape, one.stride()) == (other.device, other.dtype, other.shape, other.stride())
    return same and one.numel() > 0 and one.data_ptr() == other.data_ptr()


def _is_cast(tensor: Tensor, argument: Tensor) -> bool:
    with torch.no_grad():
        cast = tensor.to(argument)
        return argument.numel() > 0 and bool(((cast == argument) | ((cast != cast) & (argument != argument))).all())


def _rebase(expression: Expression, root: Expression, rebased: dict[Expression, Expression]) -> Expression:
    """The expression with another root; common parts stay common. ``rebased`` is kept for one batch."""
    if isinstance(expression, Root):
        return rebased.setdefault(expression, root)
    if expression not in rebased:
        source = _rebase(expression.source, root, rebased)
        rebased[expression] = Derived(source, expression.operation, expression.output)
    return rebased[expression]
