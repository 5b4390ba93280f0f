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
from ...cpp_ext.device.bags import Bags, lookup_of
from ...cpp_ext.device_groups import BagIds, bags_of
from .lookup import ReadRows
from .staged import JointKeys, StagedLookup

ROWS = -1  # the mode of a lookup that is not a bag


@dataclass(frozen=True)
class Call:
    """A lookup that a layer will make.

    Attributes:
        read: its rows.
        anchor: of the layer; with a gradient when a backward may follow.
        ids: the ids.
        mode: how bags are pooled; ``ROWS``: there are none.
        includes_last: whether the offsets end with the number of ids.
        offsets: where each bag begins; None: the ids have two dimensions, or there are no bags.
        weights: a weight for each id, in the shape of the ids; None: there are none.
    """

    read: ReadRows
    anchor: Tensor
    ids: Tensor
    mode: int
    includes_last: bool = False
    offsets: Tensor | None = None
    weights: Tensor | None = None

    @property
    def bag_ids(self) -> BagIds | None:
        """The ids in their bags; None where they are no bags, which the layer refuses."""
        weights = self.weights
        if weights is not None and (weights.requires_grad or self.mode != math.SUM or weights.shape != self.ids.shape):
            return None  # a gradient of weights is the lookup's own
        try:
            return BagIds(self.ids, self.offsets, self.includes_last)
        except ValueError:
            return None


def with_outputs(calls: Sequence[Call]) -> list[ReadRows]:
    """Returns the rows of lookups, with their outputs where one operation makes those of several.

    These have the same keys and mode, weights or none, and each a table of its own.
    """
    kinds: dict[tuple[int, int, bool], list[int]] = {}
    often: dict[int, Counter[int]] = {}  # how many lookups each table has, by joint keys
    bags: dict[int, BagIds] = {}
    for at, call in enumerate(calls):
        ids = call.read.ids
        if ids.joint is None or not call.anchor.requires_grad or not torch.is_grad_enabled():
            continue
        if id(ids.joint) not in often:
            often[id(ids.joint)] = Counter(ids.joint.tables)
        if call.mode not in (ROWS, math.SUM, math.MEAN) or often[id(ids.joint)][ids.joint.tables[ids.place]] > 1:
            continue
        if call.mode != ROWS:
            its = call.bag_ids
            if its is None:
                continue
            bags[at] = its
        kinds.setdefault((id(ids.joint), call.mode, call.weights is not None), []).append(at)
    made = [call.read for call in calls]
    for numbers in kinds.values():
        if len(numbers) > 1:
            numbers.sort(key=lambda at: calls[at].read.ids.place)
            group = _Group([calls[at] for at in numbers], [bags[at] for at in numbers if at in bags])
            outputs = _Made.apply(calls[numbers[0]].anchor, group.rows, group)
            for at, out in zip(numbers, outputs, strict=True):
                made[at] = replace(made[at], out=out)
    return made


class _Group:
    """Lookups of one kind, in the order of their keys.

    Args:
        calls: the lookups.
        bags: their ids in bags; none where they are of rows.
    """

    def __init__(self, calls: Sequence[Call], bags: Sequence[BagIds]) -> None:
        first = calls[0]
        self.ids = [call.read.ids for call in calls]
        self.tables, self.rows, self.mode = first.read.ids.tables, first.read.rows, first.mode
        self.generation = self.tables.generation
        self.joint: JointKeys = first.read.ids.joint  # type: ignore[assignment]  # with_outputs has looked
        self._bags, self._weights = bags, [call.weights for call in calls]
        if first.mode == ROWS:
            self.sizes = [each.positions.shape[0] for each in self.ids]
            self.shapes = [(*call.ids.shape, self.rows.shape[1]) for call in calls]
        else:
            self.sizes = [each.count for each in bags]
            self.shapes = [(size, self.rows.shape[1]) for size in self.sizes]
        self.all = self._of(range(len(calls)))

    def _of(self, numbers: Sequence[int]) -> _Ids:
        """Returns the ids of some of the lookups, one behind the other."""
        ids, device = [self.ids[at] for at in numbers], self.rows.device
        positions, bags, paddings, weights = math.joined([each.positions for each in ids]), None, None, None
        if self._bags:
            mine = [self._bags[at] for at in numbers]
            bags = bags_of(mine, device, lambda: torch.tensor([each.ids.numel() for each in mine]).to(device))
        if self.joint.paddings is not None and any(each.padding >= 0 for each in ids):
            counts = [0] * len(self.joint.tables)
            for at in numbers:
                counts[self.ids[at].place] = self.sizes[at]
            paddings = self.joint.paddings.index_select(0, lookup_of(tuple(counts), device))
        given = [self._weights[at] for at in numbers]
        if given[0] is not None:
            weights = math.joined(
                [each.detach().reshape(-1).to(device, torch.float32) for each in given if each is not None]
            )
        return _Ids(positions, bags, paddings, weights)

    def outputs(self) -> tuple[Tensor, ...]:
        of = self.all
        if of.bags is None:
            made = math.gather(self.rows, of.positions)
        else:
            made, _ = math.pool(
                self.rows, of.positions, of.bags, mode=self.mode, weights=of.weights, paddings=of.paddings
            )
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
        of = self.all if len(reached) == len(grads) else self._of(reached)
        joined = math.joined(parts)
        if of.bags is None:
            entries = math.entries_of_rows(joined, of.positions, rows=count, paddings=of.paddings)
        else:
            entries = math.entries_of_bags(
                joined, of.positions, of.bags, rows=count, mode=self.mode, weights=of.weights, paddings=of.paddings
            )
        is_known = of.bags is None or of.bags.is_whole
        of_grads = pairwise(accumulate([len(part) for part in parts], initial=0))
        of_ids = pairwise(accumulate([self.ids[at].positions.shape[0] for at in reached], initial=0))
        for at, its_grads, its_ids in zip(reached, of_grads, of_ids, strict=True):
            ids = self.ids[at]
            staged = StagedLookup(
                None,
                entries,
                is_by_column=False,
                left_out=ids.padding if is_known else None,
                joint=self.joint,
                place=ids.place,
                part=(its_grads, its_ids),
            )
            self.tables.stage(ids.name, staged)


@dataclass(frozen=True)
class _Ids:
    """The ids of several lookups, one behind the other.

    Attributes:
        positions: (n) int64 among the joint keys.
        bags: of the ids; None: there are none.
        paddings: (bags) or (n) int32: the place of the padding id, -1: none; None: of no lookup it is there.
        weights: (n) float32; None: there are none.
    """

    positions: Tensor
    bags: Bags | None
    paddings: Tensor | None
    weights: Tensor | None


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
