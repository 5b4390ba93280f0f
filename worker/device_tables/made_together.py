"""Outputs of several lookups of one matrix by one operation, and their derivative by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...cpp_ext.device import lookup_math as math
from ...cpp_ext.device.bags import Bags, fixed_bags
from .lookup import ReadRows
from .staged import JointKeys, StagedLookup

ROWS = -1  # the mode of a lookup that is not a bag


@dataclass(frozen=True)
class Call:
    """A lookup that a layer will make without offsets and weights.

    Attributes:
        read: its rows.
        anchor: of the layer; with a gradient when a backward may follow.
        shape: of the ids.
        mode: how bags are pooled; ``ROWS``: there are none.
    """

    read: ReadRows
    anchor: Tensor
    shape: torch.Size
    mode: int


def with_outputs(calls: Sequence[Call]) -> list[ReadRows]:
    """Returns the rows of lookups, with their outputs where one operation makes those of several.

    These have the same keys, mode and length of bags, each a table of its own, and no padding id among the ids.
    """
    kinds: dict[tuple[int, int, int], list[int]] = {}
    often: dict[int, Counter[int]] = {}  # how many lookups each table has, by joint keys
    for at, call in enumerate(calls):
        ids = call.read.ids
        is_bag = call.mode != ROWS
        fits = call.mode in (ROWS, math.SUM, math.MEAN) and (not is_bag or (len(call.shape) == 2 and call.shape[1] > 0))
        if ids.joint is not None and id(ids.joint) not in often:
            often[id(ids.joint)] = Counter(ids.joint.tables)
        is_only = ids.joint is not None and often[id(ids.joint)][ids.joint.tables[ids.place]] == 1
        if fits and is_only and ids.padding < 0 and call.anchor.requires_grad and torch.is_grad_enabled():
            kinds.setdefault((id(ids.joint), call.mode, call.shape[1] if is_bag else 0), []).append(at)
    made = [call.read for call in calls]
    for numbers in kinds.values():
        if len(numbers) > 1:
            numbers.sort(key=lambda at: calls[at].read.ids.place)
            group = _Group([calls[at] for at in numbers])
            outputs = _Made.apply(calls[numbers[0]].anchor, group.rows, group)
            for at, out in zip(numbers, outputs, strict=True):
                made[at] = replace(made[at], out=out)
    return made


class _Group:
    """Lookups of one kind, in the order of their keys."""

    def __init__(self, calls: Sequence[Call]) -> None:
        first = calls[0]
        self.ids = [call.read.ids for call in calls]
        self.tables, self.rows, self.mode = first.read.ids.tables, first.read.rows, first.mode
        self.generation = self.tables.generation
        self.joint: JointKeys = first.read.ids.joint  # type: ignore[assignment]  # with_outputs has looked
        self.positions = math.joined([each.positions for each in self.ids])
        self.bags: Bags | None = None
        if first.mode == ROWS:
            self.sizes = [each.positions.shape[0] for each in self.ids]
            self.shapes = [(*call.shape, self.rows.shape[1]) for call in calls]
        else:
            self.sizes = [call.shape[0] for call in calls]
            self.shapes = [(size, self.rows.shape[1]) for size in self.sizes]
            self.bags = fixed_bags(((sum(self.sizes), first.shape[1]),), self.rows.device)

    def outputs(self) -> tuple[Tensor, ...]:
        if self.bags is None:
            made = math.gather(self.rows, self.positions)
        else:
            made, _ = math.pool(self.rows, self.positions, self.bags, mode=self.mode)
        # Not views for autograd, because a layer's output may be changed in place.
        return tuple(
            part.view(shape).data for part, shape in zip(made.split(self.sizes), self.shapes, strict=True)
        )  # fmt: skip

    def stage(self, grads: Sequence[Tensor | None]) -> None:
        """Stages the gradients of the outputs; None: no gradient has reached a lookup."""
        self.tables.check_generation(self.ids[0].name, self.generation)
        count = self.joint.numbers.shape[0]
        reached = [at for at, grad in enumerate(grads) if grad is not None]
        if not reached:
            return
        parts = [grads[at].float().reshape(-1, self.rows.shape[1]) for at in reached]  # type: ignore[union-attr]
        positions, bags = self.positions, self.bags
        if len(reached) < len(grads):
            positions = math.joined([self.ids[at].positions for at in reached])
            if bags is not None:
                bags = fixed_bags(((sum(map(len, parts)), bags.length or 0),), positions.device)
        joined = math.joined(parts)
        if bags is None:
            entries = math.entries_of_rows(joined, positions, rows=count)
        else:
            entries = math.entries_of_bags(joined, positions, bags, rows=count, mode=self.mode)
        of_grads = pairwise(accumulate([len(part) for part in parts], initial=0))
        of_ids = pairwise(accumulate([self.ids[at].positions.shape[0] for at in reached], initial=0))
        for at, its_grads, its_ids in zip(reached, of_grads, of_ids, strict=True):
            ids = self.ids[at]
            staged = StagedLookup(
                None,
                entries,
                is_by_column=False,
                reaches_all=True,
                joint=self.joint,
                place=ids.place,
                part=(its_grads, its_ids),
            )
            self.tables.stage(ids.name, staged)


class _Made(torch.autograd.Function):
    """The outputs of a group of lookups; backward stages their gradients and is differentiable once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, group: _Group) -> tuple[Tensor, ...]:
        del rows
        ctx.group, ctx.anchor = group, anchor.shape
        ctx.set_materialize_grads(False)
        return group.outputs()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        ctx.group.stage(grads)
        return torch.zeros(ctx.anchor, device=ctx.group.rows.device), None, None
