"""The row cache in C++ against a cache in plain Python, on random traces."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from sparserow.cpp_ext import _client

WAYS, MOST_USES, HALVE_EVERY, NO_VERSION = 8, 255, 64, -1
TABLES = (3, 0x9ABCDEF0)  # the second is negative as an int32
Answer = tuple[list[int], list[int], dict[int, list[float]]]  # found, versions, rows of what is here


def set_of(table_id: int, key: int, sets: int) -> int:
    mask, odd = 2**64 - 1, 0xD6E8FEB86659FD93
    hashed = (key + table_id * 0x9E3779B97F4A7C15) & mask
    hashed = (hashed ^ (hashed >> 32)) * odd & mask
    hashed = (hashed ^ (hashed >> 32)) * odd & mask
    return ((hashed ^ (hashed >> 32)) >> 32) * sets >> 32


@dataclass
class CachedRow:
    table_id: int = 0
    key: int = 0
    version: int = NO_VERSION
    validated: int = 0
    used: int = 0
    uses: int = 0
    row: tuple[float, ...] = ()


class Cache(Protocol):
    def probe(self, table_id: int, keys: list[int], oldest: int) -> Answer: ...
    def put(self, table_id: int, keys: list[int], versions: list[int], rows: Tensor, validated: int) -> None: ...
    def drop(self, table_id: int, keys: list[int]) -> None: ...


class PlainRows:
    """The rules, one key after another."""

    def __init__(self, sets: int, dtype: str = "float32") -> None:
        self.dtype = getattr(torch, dtype)
        self.sets = [[CachedRow() for _ in range(WAYS)] for _ in range(sets)]
        self.replaced, self.call = [0] * sets, 0

    def find(self, table_id: int, key: int) -> tuple[int, CachedRow | None]:
        index = set_of(table_id, key, len(self.sets))
        return index, next((p for p in self.sets[index] if (p.table_id, p.key) == (table_id, key)), None)

    def probe(self, table_id: int, keys: list[int], oldest: int) -> Answer:
        self.call += 1
        found, versions, rows = [], [], {}
        for at, key in enumerate(keys):
            _, place = self.find(table_id, key)
            found.append(0 if place is None else 2 if place.validated >= oldest else 1)
            versions.append(NO_VERSION if place is None else place.version)
            if place is not None:
                place.uses, place.used = min(place.uses + 1, MOST_USES), self.call
                rows[at] = list(place.row)
        return found, versions, rows

    def put(self, table_id: int, keys: list[int], versions: list[int], rows: Tensor, validated: int) -> None:
        self.call += 1
        kept = rows.to(self.dtype).float().tolist()
        for key, version, row in zip(keys, versions, kept, strict=True):
            index, place = self.find(table_id, key)
            if place is None:
                place = self.make_room(index)
                place.uses = 0
            place.table_id, place.key, place.version, place.validated = table_id, key, version, validated
            place.used, place.row = self.call, tuple(row)

    def make_room(self, index: int) -> CachedRow:
        places = self.sets[index]
        least = min(places, key=lambda p: (p.table_id != 0, p.uses, p.used))
        if least.table_id != 0:
            self.replaced[index] += 1
            if self.replaced[index] == HALVE_EVERY:
                self.replaced[index] = 0
                for place in places:
                    place.uses //= 2
        return least

    def drop(self, table_id: int, keys: list[int]) -> None:
        for key in keys:
            _, place = self.find(table_id, key)
            if place is not None:
                place.table_id = 0


class NativeRows:
    """The C++ storage, asked in lists."""

    def __init__(self, sets: int, dim: int, dtype: str = "float32") -> None:
        size = sets * WAYS * _client.NativeRowCache.bytes_per_row(dim, dtype)
        self.rows = _client.NativeRowCache(capacity_bytes=size, dim=dim, dtype=dtype)
        assert self.rows.sets == sets

    def there(self, values: list[int]) -> Any:
        return np.array(values, dtype=np.int64).astype(np.uint64)

    def probe(self, table_id: int, keys: list[int], oldest: int) -> Answer:
        found, versions, rows = self.rows.probe(table_id, self.there(keys), oldest)
        states = found.tolist()
        return states, versions.astype(np.int64).tolist(), {i: rows[i].tolist() for i, s in enumerate(states) if s}

    def put(self, table_id: int, keys: list[int], versions: list[int], rows: Tensor, validated: int) -> None:
        self.rows.put(table_id, self.there(keys), self.there(versions), rows.numpy(), validated)

    def drop(self, table_id: int, keys: list[int]) -> None:
        self.rows.drop(table_id, self.there(keys))


def seed() -> int:
    given = os.environ.get("SPARSEROW_TEST_SEED")
    chosen = random.randrange(2**32) if given is None else int(given)
    print(f"SPARSEROW_TEST_SEED={chosen}")
    return chosen


def play(caches: list[Cache], dim: int, calls: int, keys: int, random_: random.Random) -> None:
    """The first cache is the reference."""
    generator = torch.Generator().manual_seed(random_.randrange(2**32))
    step = 0
    for _ in range(calls):
        table = random_.choice(TABLES)
        spread = random_.choice([1, 2**33 + 7])
        wanted = random_.sample(range(keys), random_.choice([0, 1, 5, keys // 3, min(keys, 66)]))
        batch = [key * spread for key in wanted]
        step += random_.choice([0, 0, 1])
        what = random_.choice(["probe", "probe", "put", "put", "drop"])
        if what == "probe":
            oldest = step - random_.choice([0, 1, 4])
            expected, *others = [cache.probe(table, batch, oldest) for cache in caches]
            assert all(other == expected for other in others)
        elif what == "put":
            versions = [random_.randrange(-(2**63), 2**63) for _ in batch]
            rows = torch.rand(len(batch), dim, generator=generator)
            for cache in caches:
                cache.put(table, batch, versions, rows, step)
        else:
            for cache in caches:
                cache.drop(table, batch[:5])
    is_any_here = False
    for table in TABLES:
        for spread in (1, 2**33 + 7):
            expected, *others = [cache.probe(table, [k * spread for k in range(keys)], step) for cache in caches]
            assert all(other == expected for other in others)
            is_any_here |= any(expected[0])
    assert is_any_here


@pytest.mark.parametrize(
    ("sets", "dim", "keys", "dtype"),
    [
        (1, 3, 30, "float32"),
        (5, 16, 90, "float32"),
        (64, 4, 900, "float32"),
        (5, 3, 90, "bfloat16"),
        (5, 16, 90, "float16"),
    ],
)
def test_the_cache_keeps_the_rules_on_random_traces(sets: int, dim: int, keys: int, dtype: str) -> None:
    play([PlainRows(sets, dtype), NativeRows(sets, dim, dtype)], dim, 400, keys, random.Random(seed()))


def test_16_bits_take_half_of_the_bytes_of_weights() -> None:
    plain, halved = (_client.NativeRowCache.bytes_per_row(64, dtype) for dtype in ("float32", "bfloat16"))
    assert plain - halved == 64 * 2


def test_what_was_hot_long_ago_goes_in_the_end() -> None:
    plain, native = PlainRows(1), NativeRows(1, 2)
    for cache in (plain, native):
        cache.put(3, list(range(8)), [1] * 8, torch.ones(8, 2), 0)
        cache.probe(3, list(range(8)), 0)
        assert cache.probe(3, [0], 0)[0] == [2]
        for begin in range(100, 250, 50):
            cache.put(3, list(range(begin, begin + 50)), [1] * 50, torch.ones(50, 2), 0)
    assert plain.probe(3, list(range(8)), 0) == native.probe(3, list(range(8)), 0)
    assert plain.replaced[0] == 150 % HALVE_EVERY
    assert 2 not in plain.probe(3, list(range(1, 8)), 0)[0]
