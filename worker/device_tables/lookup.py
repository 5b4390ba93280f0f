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
class IdKeys:
    """The ids of one lookup, as unique keys.

    Attributes:
        tables: the tables of the session.
        name: the name of the table.
        keys: (u) int64, sorted and unique.
        positions: (n) int64: the key of each id.
        padding: the position of the padding id; -1: it is not among the ids, or there is none.
    """

    tables: DeviceTables
    name: str
    keys: Tensor
    positions: Tensor
    padding: int


@dataclass(frozen=True)
class ReadRows:
    """The rows of a lookup that was made before its layer was called.

    Attributes:
        ids: the ids of the lookup.
        rows: (u, dim) float32, a row for each key.
    """

    ids: IdKeys
    rows: Tensor


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
        count, grads = self.keys.shape[0], grads.float().contiguous()
        if self.bags is None:
            flat = grads.reshape(self.positions.shape[0], -1)
            entries = math.entries_of_rows(flat, self.positions, rows=count, padding=self.padding)
        elif places is not None:
            entries = math.entries_of_max(grads, self.positions, places, rows=count)
        else:
            entries = math.entries_of_bags(
                grads,
                self.positions,
                self.bags,
                rows=count,
                mode=self.mode,
                weights=weights,
                padding=self.padding,
            )
        self.tables.stage(
            self.name,
            StagedLookup(
                self.keys,
                entries,
                is_by_column=places is not None,
                reaches_all=self.padding < 0 and (self.bags is None or self.bags.length is not None),
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
        tables, keys.name, keys.keys, keys.positions, keys.padding, of_bags, mode, tables.generation
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
    rows = lookups[0].tables.read_together([(each.name, each.keys) for each in lookups], digest)
    return None if rows is None else [ReadRows(*each) for each in zip(lookups, rows, strict=True)]


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
    return IdKeys(tables, name, keys, positions, place)


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
    rows = [tables.table(name).share.num_rows for _, name in named]
    lengths = [each.ids.numel() for each in wanted]
    bases = [0, *accumulate(rows)]
    if bases[-1] >= 2**63 or min(lengths) == 0:
        return [keys_of(each.binding, each.ids, each.anchor, padding=each.padding) for each in wanted]
    device, n, count = tables.device, sum(lengths), len(wanted)
    # What the host knows crosses in one copy: bases and rows of tables, lengths, and the numbers of padding ids.
    paddings = [-1 if each.padding is None else base + each.padding for each, base in zip(wanted, bases, strict=False)]
    facts = torch.tensor([*bases, *rows, *lengths, *paddings]).to(device)
    base, limit, length, padding = facts.split([count + 1, count, count, count])
    ids = _joined_ids([each.ids for each in wanted], device)
    is_bad = (ids < 0) | (ids >= limit.repeat_interleave(length, output_size=n))
    numbers, positions = torch.unique(
        ids + base[:-1].repeat_interleave(length, output_size=n), return_inverse=True
    )  # fmt: skip
    begins, places = torch.searchsorted(numbers, base), torch.searchsorted(numbers, padding)
    is_there = numbers.index_select(0, places.clamp(max=numbers.shape[0] - 1)) == padding
    places = torch.where(is_there, places - begins[:-1], -1)
    bad, *on_host = numbers_of(torch.cat([is_bad.sum().reshape(1), begins, places]))
    if bad:  # the lookup that has it says which
        return [keys_of(each.binding, each.ids, each.anchor, padding=each.padding) for each in wanted]
    uniques = [end - begin for begin, end in pairwise(on_host[: count + 1])]
    sizes = begins[1:] - begins[:-1]
    keys = numbers - base[:-1].repeat_interleave(sizes, output_size=numbers.shape[0])
    positions = positions - begins[:-1].repeat_interleave(length, output_size=n)
    return [
        IdKeys(tables, name, mine, at, place)
        for (_, name), mine, at, place in zip(
            named, keys.split(uniques), positions.split(lengths), on_host[count + 1 :], strict=True
        )
    ]  # fmt: skip


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
