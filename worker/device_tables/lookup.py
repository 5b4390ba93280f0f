"""Lookups of tables on devices: rows of ids, pooled rows of bags, and their derivative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...cpp_ext.device import lookup_math as math
from ...cpp_ext.device.bags import Bags
from ...cpp_ext.device_groups import BagIds, bags_of
from ...proto.errors import InvalidArgument, SparserowError
from .device_tables import tables_of
from .id_keys import IdKeys, keys_of
from .staged import StagedLookup


@dataclass(frozen=True)
class BagOptions:
    """How the ids of a lookup are pooled.

    Attributes:
        mode: the number of the mode, as in ``lookup_math``.
        includes_last: whether the offsets end with the number of ids.
        offsets: where each bag begins; None: the ids have two dimensions.
        weights: a weight for each id, in the shape of the ids; None: there are none.
    """

    mode: int
    includes_last: bool
    offsets: Tensor | None
    weights: Tensor | None


@dataclass(frozen=True)
class ReadRows:
    """The rows of a lookup that was made before its layer was called.

    Attributes:
        ids: the ids of the lookup.
        rows: (u, dim) float32, a row for each key, or for each of the joint keys.
        out: the output of the layer's arguments, float32; None: it is made when the layer is called.
    """

    ids: IdKeys
    rows: Tensor
    out: Tensor | None = None

    def of_ids(self) -> ReadRows:
        """Returns the same without the output, for a call with other offsets or weights."""
        return replace(self, out=None)


@dataclass(frozen=True)
class _Lookup(IdKeys):
    """The ids of one lookup and how they are pooled.

    Attributes:
        bags: of the ids; None: the lookup is of rows.
        mode: the mode of the bags.
        generation: of the step.
    """

    bags: Bags | None
    mode: int
    generation: int

    @cached_property
    def paddings(self) -> Tensor | None:
        """The position of the padding id of each bag, or of each id, int32; None: it is not among the ids."""
        if self.padding < 0:
            return None
        count = self.positions.shape[0] if self.bags is None else self.bags.count
        return torch.full((count,), self.padding, dtype=torch.int32, device=self.positions.device)

    def stage(self, grads: Tensor, weights: Tensor | None, places: Tensor | None) -> None:
        """Stages the gradient of the output."""
        self.tables.check_generation(self.name, self.generation)
        is_known = places is None and (self.bags is None or self.bags.is_whole)
        joint, positions, paddings = self.joint, self.positions, self.paddings
        if places is not None and joint is not None:  # entries by column count the keys of this lookup alone
            joint, positions = None, positions - self.begin
        count = self.keys.shape[0] if joint is None else joint.numbers.shape[0]
        grads = grads.float().contiguous()
        if self.bags is None:
            entries = math.entries_of_rows(
                grads.reshape(positions.shape[0], -1), positions, rows=count, paddings=paddings
            )  # fmt: skip
        elif places is not None:
            entries = math.entries_of_max(grads, positions, places, rows=count)
        else:
            entries = math.entries_of_bags(
                grads, positions, self.bags, rows=count, mode=self.mode, weights=weights, paddings=paddings
            )
        self.tables.stage(
            self.name,
            StagedLookup(
                None if joint is not None else self.keys,
                entries,
                is_by_column=places is not None,
                left_out=self.padding if is_known else None,
                joint=joint,
                place=self.place,
            ),
        )


def look_up(
    binding: str,
    ids: Tensor,
    anchor: Tensor,
    *,
    padding: int | None,
    bags: BagOptions | None = None,
    made: ReadRows | None = None,
) -> Tensor:
    """Looks rows up on the ranks that have them. Every rank makes the same lookups in the same order.

    Args:
        binding: the full name of the table.
        ids: the ids, int64 or int32 of any shape, on the host or the device.
        anchor: a tensor on the table's device; with a gradient when a backward may follow.
        padding: the id without gradient, which bags leave out; None: there is none.
        bags: how the ids are pooled; None: a row for each id.
        made: what :func:`read_together` returned for these ids in this step; None: the rows are read now.

    Returns:
        Float32 on the device of the anchor: ``ids.shape + (dim,)``, or (bags, dim).

    Raises:
        InvalidArgument: an id is out of range, or shapes do not fit together. The other ranks raise
            FailedPrecondition.
        FailedPrecondition: the table is on another device, or a rank is in another lookup.
        Unavailable, DeadlineExceeded: a rank is gone, or did not make the lookup in time.
    """
    tables = tables_of(binding)
    tables.check_usable()
    if made is not None and made.out is not None:
        return made.out
    try:
        if bags is not None:
            _check_bags(ids, bags)
        keys = keys_of(binding, ids, anchor, padding=padding) if made is None else made.ids
        of_bags = None if bags is None else _bags(ids, bags, tables.device)
    except (SparserowError, ValueError):
        if made is None:
            tables.exchanges.refuse()
        raise
    rows = tables.read(keys.name, keys.keys) if made is None else made.rows
    mode = -1 if bags is None else bags.mode
    lookup = _Lookup(
        tables, keys.name, keys.own_keys, keys.positions, keys.padding, keys.joint, keys.place, of_bags, mode,
        tables.generation,
    )  # fmt: skip
    weights = None if bags is None or bags.weights is None else bags.weights
    if anchor.requires_grad and torch.is_grad_enabled():
        out: Tensor = _Looked.apply(anchor, weights, rows, lookup)
    else:
        out = _pooled(rows, lookup, weights)[0]
    return out if bags is not None else out.view(*ids.shape, rows.shape[1])


def read_together(lookups: Sequence[IdKeys], digest: int) -> list[ReadRows] | None:
    """Reads the rows of several lookups by one exchange of the ranks.

    Args:
        lookups: of the tables of one session, the same tables in the same order on every rank.
        digest: a number above 0 that ranks share whose lookups are alike.

    Returns:
        What :func:`look_up` takes for each; None on every rank where one does not make these lookups now.

    Raises:
        SparserowError: see :func:`look_up`.
    """
    tables = lookups[0].tables
    of_joint: dict[int, Tensor] = {}
    for each in lookups:
        if each.joint is not None and each.joint.rows is not None and id(each.joint) not in of_joint:
            of_joint[id(each.joint)] = tables.rows_at(each.name, each.joint.rows)
    if of_joint:  # this rank has all rows
        return [ReadRows(each, of_joint[id(each.joint)]) for each in lookups]
    rows = tables.read_together([(each.name, each.keys) for each in lookups], digest)
    if rows is None:
        return None
    parts: dict[int, list[tuple[int, Tensor]]] = {}
    for each, its in zip(lookups, rows, strict=True):
        if each.joint is not None:
            parts.setdefault(id(each.joint), []).append((each.place, its))
    of_joint = {
        joint: torch.cat([its for _, its in sorted(of, key=lambda pair: pair[0])]) for joint, of in parts.items()
    }
    return [ReadRows(each, of_joint.get(id(each.joint), its)) for each, its in zip(lookups, rows, strict=True)]


def _check_bags(ids: Tensor, bags: BagOptions) -> None:
    if bags.weights is None:
        return
    if bags.mode != math.SUM:
        raise InvalidArgument("gather_bag: per_sample_weights are allowed for mode sum only")
    if bags.weights.shape != ids.shape:
        raise InvalidArgument("gather_bag: per_sample_weights must have the shape of ids")


def _bags(ids: Tensor, bags: BagOptions, device: torch.device) -> Bags:
    given = BagIds(ids, bags.offsets, bags.includes_last)
    return bags_of([given], device, lambda: torch.full((1,), ids.numel(), device=device))


def _flat(weights: Tensor | None, device: torch.device) -> Tensor | None:
    return None if weights is None else weights.detach().reshape(-1).to(device, torch.float32)


def _pooled(rows: Tensor, lookup: _Lookup, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if lookup.bags is None:
        return math.gather(rows, lookup.positions), None
    return math.pool(
        rows,
        lookup.positions,
        lookup.bags,
        mode=lookup.mode,
        weights=_flat(weights, rows.device),
        paddings=lookup.paddings,
    )


class _Looked(torch.autograd.Function):
    """The output of a lookup; backward stages its gradient and is differentiable once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor | None, rows: Tensor, lookup: _Lookup) -> Tensor:
        out, places = _pooled(rows, lookup, weights)
        ctx.lookup, ctx.places, ctx.anchor = lookup, places, anchor.shape
        needs_rows = weights is not None and weights.requires_grad
        ctx.save_for_backward(weights, rows if needs_rows else None)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        weights, rows = ctx.saved_tensors
        lookup: _Lookup = ctx.lookup
        lookup.stage(grads[0], _flat(weights, grads[0].device), ctx.places)
        of_weights = None
        if rows is not None and lookup.bags is not None:
            made = math.weights_gradient(
                grads[0].float(), rows, lookup.positions, lookup.bags, paddings=lookup.paddings
            )  # fmt: skip
            of_weights = made.view(weights.shape).to(weights)
        return torch.zeros(ctx.anchor, device=grads[0].device), of_weights, None, None
