"""Unique keys of the ids of lookups: of one, or of all lookups of a forward by one search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...cpp_ext.device.link import numbers_of
from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from .device_tables import DeviceTables, tables_of
from .staged import JointKeys


@dataclass(frozen=True)
class IdKeys:
    """The ids of one lookup, as unique keys.

    Attributes:
        tables: the tables of the session.
        name: the name of the table.
        own_keys: (u) int64, sorted and unique; None: ``joint`` has them.
        positions: (n) int64: the key of each id, among those of ``joint`` where there is one.
        padding: the position of the padding id; -1: it is not among the ids, or there is none.
        joint: the keys of the lookups of its matrix that are made with it; None: it is made alone.
        place: of the lookup among those.
    """

    tables: DeviceTables
    name: str
    own_keys: Tensor | None
    positions: Tensor
    padding: int
    joint: JointKeys | None
    place: int

    @property
    def keys(self) -> Tensor:
        """(u) int64, sorted and unique."""
        if self.own_keys is not None:
            return self.own_keys
        assert self.joint is not None
        return self.joint.keys_of(self.place)

    @property
    def begin(self) -> int:
        """The place of the lookup's first key among those of ``joint``."""
        return 0 if self.joint is None else self.joint.begins[self.place]


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
    heads = [first for first, end in pairwise([*begins_of, count]) for _ in range(first, end)]
    # What the host knows crosses in one copy: bases and rows of tables, lengths, the numbers of padding ids, the first
    # lookup of each matrix, and how far a row in its matrix is from its number.
    paddings = [-1 if each.padding is None else base + each.padding for each, base in zip(wanted, bases, strict=False)]
    shifts = [matrix.firsts[table] - base for (matrix, table), base in zip(places, bases, strict=False)]
    last = [each - 1 for each in rows]
    facts = torch.tensor([*bases, *last, *lengths, *paddings, *heads, *shifts]).to(device, non_blocking=True)
    base, padding, head, shift = (facts[at : at + count] for at in (0, 3 * count + 1, 4 * count + 1, 5 * count + 1))
    ids = _joined_ids([each.ids for each in wanted], device)
    # The lookup of each id, and with it how many rows its number is behind, and the last row.
    of_id = torch.repeat_interleave(facts[2 * count + 1 : 3 * count + 1], output_size=n)
    behind, highest = facts[: 2 * count + 1].as_strided((2, count), (count + 1, 1)).index_select(1, of_id)
    lowest = torch.minimum(ids, highest - ids).min()  # below 0 where an id is out of range
    numbers, positions = torch.unique(ids + behind, return_inverse=True)
    begins = torch.searchsorted(numbers, facts[: count + 1])
    is_one_matrix = len(begins_of) == 1
    own = begins[:1] if is_one_matrix else begins.index_select(0, head)  # where the keys of each lookup's matrix begin
    counted, padded = [lowest.reshape(1), begins], None
    if max(paddings) >= 0:
        found = torch.searchsorted(numbers, padding)
        is_there = numbers.index_select(0, found.clamp(max=numbers.shape[0] - 1)) == padding
        padded = torch.where(is_there, found - own, -1)
        counted.append(padded)
    smallest, *on_host = numbers_of(torch.cat(counted))
    if smallest < 0:  # the lookup that has it says which
        return _one_by_one(wanted, order)
    of_padding = on_host[count + 1 :] or [-1] * count
    uniques = [end - begin for begin, end in pairwise(on_host[: count + 1])]
    in_matrix = numbers if tables.is_alone else None
    if in_matrix is not None and any(shifts):
        of_key = torch.repeat_interleave(begins[1:] - begins[:-1], output_size=numbers.shape[0])
        in_matrix = numbers + shift.index_select(0, of_key)
    if not is_one_matrix:
        positions = positions - own.index_select(0, of_id)
    joints: dict[int, JointKeys] = {}
    for first, end in pairwise([*begins_of, count]):
        mine = slice(on_host[first], on_host[end])
        at_rows = None if in_matrix is None else in_matrix[mine]
        of_tables = [table for _, table in places[first:end]]
        at_paddings = None if padded is None else padded[first:end].to(torch.int32)
        joints[first] = JointKeys(numbers[mine], base[first:end], at_rows, of_tables, uniques[first:end], at_paddings)
    of_wanted = [
        IdKeys(tables, name, None, at, place, joints[first], number - first)
        for number, (name, at, place, first) in enumerate(
            zip(names, positions.split(lengths), of_padding, heads, strict=True)
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


def _facts_of(keys: Tensor, padding: int) -> tuple[int, int, int]:
    """Returns the lowest and the highest of sorted keys, and the position of the padding id, -1 where it is not there.

    The host waits for the device once.
    """
    wanted = torch.full((1,), padding, dtype=torch.int64, device=keys.device)
    place = torch.clamp(torch.searchsorted(keys, wanted), max=keys.shape[0] - 1)
    place = torch.where(keys.index_select(0, place) == wanted, place, -1)
    lowest, highest, at = numbers_of(torch.cat([keys[:1], keys[-1:], place]))
    return lowest, highest, at
