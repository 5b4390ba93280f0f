"""Lookups of tables on devices: rows of ids, pooled rows of bags, and their derivative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...cpp_ext.device import lookup_math as math
from ...cpp_ext.device.link import numbers_of
from ...cpp_ext.device_ops import bags_of
from ...proto.errors import FailedPrecondition, InvalidArgument, SparserowError, not_allowed
from .device_tables import DeviceTables, tables_of
from .staged import JointKeys, StagedLookup


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
class IdKeys:
    """The ids of one lookup, as unique keys.

    Attributes:
        tables: the tables of the session.
        name: the name of the table.
        keys: (u) int64, sorted and unique.
        positions: (n) int64: the key of each id, among those of ``joint`` where there is one.
        padding: the position of the padding id; -1: it is not among the ids, or there is none.
        joint: the keys of the lookups of its matrix that are made with it; None: it is made alone.
        place: of the lookup among those.
    """

    tables: DeviceTables
    name: str
    keys: Tensor
    positions: Tensor
    padding: int
    joint: JointKeys | None
    place: int

    @property
    def begin(self) -> int:
        """The place of the lookup's first key among those of ``joint``."""
        return 0 if self.joint is None else sum(self.joint.sizes[: self.place])


@dataclass(frozen=True)
class ReadRows:
    """The rows of a lookup that was made before its layer was called.

    Attributes:
        ids: the ids of the lookup.
        rows: (u, dim) float32, a row for each key, or for each of the joint keys.
        out: the output without offsets and weights, float32; None: it is made when the layer is called.
    """

    ids: IdKeys
    rows: Tensor
    out: Tensor | None = None


@dataclass(frozen=True)
class _Lookup(IdKeys):
    """The ids of one lookup and how they are pooled.

    Attributes:
        bags: of the ids; None: the lookup is of rows.
        mode: the mode of the bags.
        generation: of the step.
    """

    bags: math.Bags | None
    mode: int
    generation: int

    def stage(self, grads: Tensor, weights: Tensor | None, places: Tensor | None) -> None:
        """Stages the gradient of the output."""
        if self.tables.generation != self.generation:
            raise FailedPrecondition(
                f"table {self.name!r}: gradient for ids that were not looked up in this step: call backward before "
                "session.step"
            )
        reaches_all = self.padding < 0 and (self.bags is None or self.bags.length is not None)
        joint, begin = self.joint if reaches_all and places is None else None, 0 if self.joint is None else self.begin
        positions, padding = self.positions, self.padding
        if joint is None and begin:  # entries that leave keys out count those of this lookup alone
            positions, padding = positions - begin, padding - begin if padding >= 0 else -1
        count, grads = self.keys.shape[0], grads.float().contiguous()
        if self.bags is None:
            entries = math.entries_of_rows(
                grads.reshape(positions.shape[0], -1), positions, rows=count, padding=padding
            )  # fmt: skip
        elif places is not None:
            entries = math.entries_of_max(grads, positions, places, rows=count)
        else:
            entries = math.entries_of_bags(
                grads, positions, self.bags, rows=count, mode=self.mode, weights=weights, padding=padding
            )
        self.tables.stage(
            self.name,
            StagedLookup(
                self.keys,
                entries,
                is_by_column=places is not None,
                reaches_all=reaches_all,
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
    if made is not None and made.out is not None and (bags is None or bags.offsets is bags.weights is None):
        return made.out
    try:
        if bags is not None:
            _check_bags(ids, bags)
        keys = keys_of(binding, ids, anchor, padding=padding) if made is None else made.ids
        of_bags = None if bags is None else bags_of(ids, bags.offsets, bags.includes_last, tables.device)
    except (SparserowError, ValueError):
        if made is None:
            tables.exchanges.refuse()
        raise
    rows = tables.read(keys.name, keys.keys) if made is None else made.rows
    mode = -1 if bags is None else bags.mode
    lookup = _Lookup(
        tables, keys.name, keys.keys, keys.positions, keys.padding, keys.joint, keys.place, of_bags, mode,
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
    if tables.is_alone:
        for each in lookups:
            if each.joint is not None and each.joint.rows is not None and id(each.joint) not in of_joint:
                of_joint[id(each.joint)] = tables.rows_at(each.name, each.joint.rows)
        if len(of_joint) > 0:
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


def keys_of(binding: str, ids: Tensor, anchor: Tensor, *, padding: int | None) -> IdKeys:
    """Returns the unique keys of ids; no rank is called. The arguments are those of :func:`look_up`.

    Raises:
        InvalidArgument: an id is out of range, or not of an integer dtype.
        FailedPrecondition: the table is on another device.
    """
    tables, name = _table_of(binding, ids, anchor)
    keys, positions = torch.unique(ids.reshape(-1).to(tables.device, torch.int64), return_inverse=True)
    rows, place = tables.table(name).share.num_rows, -1
    if keys.shape[0]:
        lowest, highest, place = _facts_of(keys, -1 if padding is None else padding)
        for bad in (lowest, highest):
            if not 0 <= bad < rows:
                raise InvalidArgument(f"table {binding!r}: id {bad} is not allowed; allowed: [0, {rows})")
    return IdKeys(tables, name, keys, positions, place, None, 0)


@dataclass(frozen=True)
class WantedIds:
    """The ids of one lookup of a forward; see :func:`look_up`."""

    binding: str
    ids: Tensor
    anchor: Tensor
    padding: int | None


def keys_of_all(wanted: Sequence[WantedIds]) -> list[IdKeys]:
    """Returns what :func:`keys_of` does for each of several lookups; the host waits as often as for one.

    The ids of a lookup are numbered behind all rows of the tables of the lookups before it, so that one search for
    unique numbers serves all.

    Args:
        wanted: lookups of the tables of one session.

    Raises:
        SparserowError: see :func:`keys_of`.
    """
    named = [_table_of(each.binding, each.ids, each.anchor) for each in wanted]
    tables = named[0][0]
    places = [tables.place_of(name) for _, name in named]
    # By matrix, and by table within each, because the sums of a step are in this order.
    order = sorted(range(len(wanted)), key=lambda at: tables.number_of(named[at][1]))
    wanted, places = [wanted[at] for at in order], [places[at] for at in order]
    names = [named[at][1] for at in order]
    rows = [tables.table(name).share.num_rows for name in names]
    lengths = [each.ids.numel() for each in wanted]
    bases = [0, *accumulate(rows)]
    if bases[-1] >= 2**63 or min(lengths) == 0:
        return _one_by_one(wanted, order)
    device, n, count = tables.device, sum(lengths), len(wanted)
    begins_of = [at for at in range(count) if at == 0 or places[at][0] is not places[at - 1][0]]  # of each matrix
    heads = [max(first for first in begins_of if first <= at) for at in range(count)]
    # What the host knows crosses in one copy: bases and rows of tables, lengths, the numbers of padding ids, the first
    # lookup of each matrix, and how far a row in its matrix is from its number.
    paddings = [-1 if each.padding is None else base + each.padding for each, base in zip(wanted, bases, strict=False)]
    shifts = [matrix.firsts[table] - base for (matrix, table), base in zip(places, bases, strict=False)]
    facts = torch.tensor([*bases, *rows, *lengths, *paddings, *heads, *shifts]).to(device)
    base, limit, length, padding, head, shift = facts.split([count + 1, count, count, count, count, count])
    ids = _joined_ids([each.ids for each in wanted], device)
    of_id = torch.repeat_interleave(length, output_size=n)  # the lookup of each id
    is_bad = (ids < 0) | (ids >= limit.index_select(0, of_id))
    numbers, positions = torch.unique(ids + base.index_select(0, of_id), return_inverse=True)
    begins = torch.searchsorted(numbers, base)
    own = begins.index_select(0, head)  # where the keys of each lookup's matrix begin
    counted = [is_bad.sum().reshape(1), begins]
    if max(paddings) >= 0:
        found = torch.searchsorted(numbers, padding)
        is_there = numbers.index_select(0, found.clamp(max=numbers.shape[0] - 1)) == padding
        counted.append(torch.where(is_there, found - own, -1))
    bad, *on_host = numbers_of(torch.cat(counted))
    if bad:  # the lookup that has it says which
        return _one_by_one(wanted, order)
    of_padding = on_host[count + 1 :] or [-1] * count
    uniques = [end - begin for begin, end in pairwise(on_host[: count + 1])]
    of_key = torch.repeat_interleave(begins[1:] - begins[:-1], output_size=numbers.shape[0])
    keys = numbers - base.index_select(0, of_key)
    in_matrix = numbers + shift.index_select(0, of_key) if tables.is_alone else None
    if len(begins_of) > 1:
        positions = positions - own.index_select(0, of_id)
    joints: list[JointKeys] = []
    for first, end in pairwise([*begins_of, count]):
        mine = slice(on_host[first], on_host[end])
        at_rows = None if in_matrix is None else in_matrix[mine]
        joints.append(JointKeys(keys[mine], at_rows, [table for _, table in places[first:end]], uniques[first:end]))
    of_wanted = [
        IdKeys(tables, name, mine, at, place, joints[begins_of.index(first)], number - first)
        for number, (name, mine, at, place, first) in enumerate(
            zip(names, keys.split(uniques), positions.split(lengths), of_padding, heads, strict=True)
        )
    ]
    return [of_wanted[at] for at in _inverse(order)]


def _one_by_one(wanted: Sequence[WantedIds], order: Sequence[int]) -> list[IdKeys]:
    """Returns the keys of each lookup, made alone, in the order before they were sorted."""
    made = [keys_of(each.binding, each.ids, each.anchor, padding=each.padding) for each in wanted]
    return [made[at] for at in _inverse(order)]


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda at: order[at])


def _joined_ids(ids: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the ids of all lookups, (n) int64 on the device; those on one device cross in one copy."""
    flat = [each.reshape(-1).to(torch.int64) for each in ids]
    if all(each.device == flat[0].device for each in flat):
        return torch.cat(flat).to(device)
    return torch.cat([each.to(device) for each in flat])


def _table_of(binding: str, ids: Tensor, anchor: Tensor) -> tuple[DeviceTables, str]:
    tables = tables_of(binding)
    if anchor.device.type != tables.device.type:
        raise FailedPrecondition(
            f"table {binding!r} is on {tables.device}, and its layer was moved to {anchor.device}; move the model to "
            "its device before distribute"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise not_allowed("ids.dtype", ids.dtype, "int64, int32")
    return tables, binding.partition("/")[2]


def _check_bags(ids: Tensor, bags: BagOptions) -> None:
    if bags.weights is None:
        return
    if bags.mode != math.SUM:
        raise InvalidArgument("gather_bag: per_sample_weights are allowed for mode sum only")
    if bags.weights.shape != ids.shape:
        raise InvalidArgument("gather_bag: per_sample_weights must have the shape of ids")


def _facts_of(keys: Tensor, padding: int) -> tuple[int, int, int]:
    """Returns the lowest and the highest of sorted keys, and the position of the padding id, -1 where it is not there.

    The host waits for the device once.
    """
    wanted = torch.full((1,), padding, dtype=torch.int64, device=keys.device)
    place = torch.clamp(torch.searchsorted(keys, wanted), max=keys.shape[0] - 1)
    place = torch.where(keys.index_select(0, place) == wanted, place, -1)
    lowest, highest, at = numbers_of(torch.cat([keys[:1], keys[-1:], place]))
    return lowest, highest, at


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
        padding=lookup.padding,
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
                grads[0].float(), rows, lookup.positions, lookup.bags, padding=lookup.padding
            )  # fmt: skip
            of_weights = made.view(weights.shape).to(weights)
        return torch.zeros(ctx.anchor, device=grads[0].device), of_weights, None, None
