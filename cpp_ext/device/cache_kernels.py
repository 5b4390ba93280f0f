"""Triton kernels of the row cache: the rules of ``cpp_ext/session/row_cache.h``, on the device of the model.

One program at a time changes a set of ``WAYS`` places, and takes its keys in order. So the same calls give the same
cache on every device. Versions are uint64 bit patterns in int64. Needs only torch and triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

MISS, STALE, HIT = 0, 1, 2
WAYS = 8
MOST_USES = 255
HALVE_EVERY = 64
TABLE_SALT = 0x9E3779B97F4A7C15  # times the table's id: the offset of the table's keys before they are hashed
_ODD = tl.constexpr(0xD6E8FEB86659FD93)

_MISS, _STALE, _HIT = tl.constexpr(MISS), tl.constexpr(STALE), tl.constexpr(HIT)
_WAYS = tl.constexpr(WAYS)
_MOST_USES, _HALVE_EVERY = tl.constexpr(MOST_USES), tl.constexpr(HALVE_EVERY)


@triton.jit
def _set_of(key, salt, sets):
    hash_ = key.to(tl.uint64, bitcast=True) + salt.to(tl.uint64, bitcast=True)
    hash_ = (hash_ ^ (hash_ >> 32)) * _ODD
    hash_ = (hash_ ^ (hash_ >> 32)) * _ODD
    hash_ = hash_ ^ (hash_ >> 32)
    return (((hash_ >> 32) * sets) >> 32).to(tl.int64)


@triton.jit(do_not_specialize=["n"])
def set_kernel(keys_in, salt_in, n, sets, set_out, BLOCK: tl.constexpr):
    """Writes the set of each key of keys_in (n) to set_out (n)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_in + at, mask=at < n, other=0)
    tl.store(set_out + at, _set_of(key, tl.load(salt_in), sets), mask=at < n)


@triton.jit
def _place_of(key, here, keys, tables, table_id, sets, salt):
    """Returns the place of each key and whether the key is there; the place of an absent key is 0."""
    way = tl.arange(0, _WAYS)
    place = _set_of(key, salt, sets)[:, None] * _WAYS + way[None, :]
    is_it = (tl.load(keys + place) == key[:, None]) & (tl.load(tables + place) == table_id) & here[:, None]
    return tl.sum(tl.where(is_it, place, 0), axis=1), tl.sum(is_it.to(tl.int32), axis=1) > 0


@triton.jit(do_not_specialize=["n", "table_id", "call"])
def probe_kernel(
    keys_in,
    salt_in,
    oldest_in,
    n,
    table_id,
    call,
    sets,
    keys,
    tables,
    versions,
    validated,
    used,
    uses,
    rows,
    found_out,
    versions_out,
    rows_out,
    dim,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Writes the state, version and row of each key of keys_in (n), unique, and counts the use of the rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    key = tl.load(keys_in + at, mask=here, other=0)
    place, is_there = _place_of(key, here, keys, tables, table_id, sets, tl.load(salt_in))
    is_fresh = tl.load(validated + place, mask=is_there, other=0) >= tl.load(oldest_in)
    tl.store(found_out + at, tl.where(is_there, tl.where(is_fresh, _HIT, _STALE), _MISS), mask=here)
    version = tl.load(versions + place, mask=is_there, other=-1)
    tl.store(versions_out + at, version, mask=here)
    count = tl.load(uses + place, mask=is_there, other=0)
    tl.store(uses + place, tl.minimum(count + 1, _MOST_USES), mask=is_there)
    tl.store(used + place, tl.zeros_like(count) + call, mask=is_there)
    for begin in range(0, dim, BLOCK_D):
        column = begin + tl.arange(0, BLOCK_D)
        mask = is_there[:, None] & (column < dim)[None, :]
        row = tl.load(rows + place[:, None] * dim + column[None, :], mask=mask)
        tl.store(rows_out + at.to(tl.int64)[:, None] * dim + column[None, :], row, mask=mask)


@triton.jit(do_not_specialize=["n", "table_id"])
def drop_kernel(keys_in, salt_in, n, table_id, sets, keys, tables, BLOCK: tl.constexpr):
    """Removes the rows of keys_in (n)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    key = tl.load(keys_in + at, mask=here, other=0)
    place, is_there = _place_of(key, here, keys, tables, table_id, sets, tl.load(salt_in))
    tl.store(tables + place, tl.zeros_like(place).to(tl.int32), mask=is_there)


@triton.jit(do_not_specialize=["table_id", "call"])
def put_kernel(
    order,
    begins,
    set_in,
    keys_in,
    versions_in,
    rows_in,
    validated_in,
    table_id,
    call,
    keys,
    tables,
    versions,
    validated,
    used,
    uses,
    replaced,
    rows,
    dim,
    BLOCK_D: tl.constexpr,
):
    """Inserts rows; one program handles one set, and inserts keys order[begins[p]:begins[p + 1]] one after another."""
    begin, end = tl.load(begins + tl.program_id(0)), tl.load(begins + tl.program_id(0) + 1)
    set_ = tl.load(set_in + tl.load(order + begin))
    way = tl.arange(0, _WAYS)
    place = set_ * _WAYS + way
    set_keys, set_tables = tl.load(keys + place), tl.load(tables + place)
    set_versions, set_validated = tl.load(versions + place), tl.load(validated + place)
    set_used, set_uses = tl.load(used + place), tl.load(uses + place)
    set_replaced = tl.load(replaced + set_)
    now = tl.load(validated_in)
    for i in range(begin, end):
        at = tl.load(order + i)
        key = tl.load(keys_in + at)
        is_it = (set_keys == key) & (set_tables == table_id)
        is_new = tl.sum(is_it.to(tl.int32), axis=0) == 0
        # A key that is there already keeps its place. Otherwise an empty place is taken, or the place with the
        # fewest uses, the earliest last use and the lowest way, in this order.
        worth = (set_tables != 0).to(tl.int64) * (_MOST_USES + 1) + set_uses.to(tl.int64)
        worth = ((worth << 32) + set_used.to(tl.int64)) * _WAYS + way
        worth = tl.where(is_it, -_WAYS + way, worth)
        least = tl.min(worth, axis=0)
        chosen = worth == least
        replaces = is_new & (tl.sum((chosen & (set_tables != 0)).to(tl.int32), axis=0) > 0)
        set_replaced += replaces.to(tl.int32)
        halves = set_replaced == _HALVE_EVERY
        set_replaced = tl.where(halves, 0, set_replaced)
        set_uses = tl.where(halves, set_uses // 2, set_uses)
        set_uses = tl.where(chosen & is_new, 0, set_uses)
        set_keys = tl.where(chosen, key, set_keys)
        set_tables = tl.where(chosen, table_id, set_tables)
        set_versions = tl.where(chosen, tl.load(versions_in + at), set_versions)
        set_validated = tl.where(chosen, now, set_validated)
        set_used = tl.where(chosen, call, set_used)
        to = tl.sum(tl.where(chosen, place, 0), axis=0)
        for first in range(0, dim, BLOCK_D):
            column = first + tl.arange(0, BLOCK_D)
            row = tl.load(rows_in + at * dim + column, mask=column < dim)
            tl.store(rows + to * dim + column, row, mask=column < dim)
    tl.store(keys + place, set_keys)
    tl.store(tables + place, set_tables)
    tl.store(versions + place, set_versions)
    tl.store(validated + place, set_validated)
    tl.store(used + place, set_used)
    tl.store(uses + place, set_uses)
    tl.store(replaced + set_, set_replaced)


@triton.jit
def sum_kernel(order, begins, grads, sums, dim, BLOCK_D: tl.constexpr):
    """Writes to sums[p] the sum of the rows order[begins[p]:begins[p + 1]] of grads, added in that order.

    One program handles one key and one range of columns.
    """
    begin, end = tl.load(begins + tl.program_id(0)), tl.load(begins + tl.program_id(0) + 1)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.load(grads + tl.load(order + begin) * dim + column, mask=column < dim)
    for i in range(begin + 1, end):
        total += tl.load(grads + tl.load(order + i) * dim + column, mask=column < dim)
    tl.store(sums + tl.program_id(0).to(tl.int64) * dim + column, total, mask=column < dim)
