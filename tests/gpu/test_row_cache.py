"""The row cache's kernels against a cache in plain Python, and the C++ storage where it is built, on random traces."""

from __future__ import annotations

import importlib
import os
import random
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
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

    def __init__(self, sets: int) -> None:
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
        for key, version, row in zip(keys, versions, rows.tolist(), strict=True):
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


class KernelRows:
    """The kernels, asked in lists."""

    def __init__(self, module: ModuleType, sets: int, dim: int, device: torch.device) -> None:
        self.device = device
        self.rows = module.DeviceRows(sets * WAYS * module.DeviceRows.bytes_per_row(dim), dim, device)
        assert self.rows.sets == sets

    def there(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def probe(self, table_id: int, keys: list[int], oldest: int) -> Answer:
        found, versions, rows = (part.tolist() for part in self.rows.probe(table_id, self.there(keys), oldest))
        return found, versions, {at: rows[at] for at, state in enumerate(found) if state}

    def put(self, table_id: int, keys: list[int], versions: list[int], rows: Tensor, validated: int) -> None:
        self.rows.put(table_id, self.there(keys), self.there(versions), rows.to(self.device), validated)

    def drop(self, table_id: int, keys: list[int]) -> None:
        self.rows.drop(table_id, self.there(keys))


class NativeRows:
    """The C++ storage, asked in lists."""

    def __init__(self, native: Any, sets: int, dim: int) -> None:
        import numpy as np

        self.np = np
        self.rows = native.NativeRowCache(
            capacity_bytes=sets * WAYS * native.NativeRowCache.bytes_per_row(dim), dim=dim
        )
        assert self.rows.sets == sets

    def there(self, values: list[int]) -> Any:
        return self.np.array(values, dtype=self.np.int64).astype(self.np.uint64)

    def probe(self, table_id: int, keys: list[int], oldest: int) -> Answer:
        found, versions, rows = self.rows.probe(table_id, self.there(keys), oldest)
        states = found.tolist()
        return states, versions.astype(self.np.int64).tolist(), {i: rows[i].tolist() for i, s in enumerate(states) if s}

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


@pytest.mark.parametrize(("sets", "dim", "keys"), [(1, 3, 30), (5, 16, 90), (3, 130, 40)])
def test_kernels_keep_the_rules_on_random_traces(
    device_rows: ModuleType, device: torch.device, sets: int, dim: int, keys: int
) -> None:
    random_ = random.Random(seed())
    play([PlainRows(sets), KernelRows(device_rows, sets, dim, device)], dim, 16, keys, random_)


def test_what_was_hot_long_ago_goes_in_the_end(device_rows: ModuleType, device: torch.device) -> None:
    plain, kernel = PlainRows(1), KernelRows(device_rows, 1, 2, device)
    for cache in (plain, kernel):
        cache.put(3, list(range(8)), [1] * 8, torch.ones(8, 2), 0)
        cache.probe(3, list(range(8)), 0)
        assert cache.probe(3, [0], 0)[0] == [2]
        for begin in range(100, 250, 50):
            cache.put(3, list(range(begin, begin + 50)), [1] * 50, torch.ones(50, 2), 0)
    assert plain.probe(3, list(range(8)), 0) == kernel.probe(3, list(range(8)), 0)
    assert plain.replaced[0] == 150 % HALVE_EVERY == kernel.rows._replaced.tolist()[0]
    assert 2 not in plain.probe(3, list(range(1, 8)), 0)[0]


def test_the_native_storage_keeps_the_rules_on_random_traces(device_rows: ModuleType, device: torch.device) -> None:
    try:
        native = importlib.import_module("sparserow.cpp_ext._client")
    except ImportError:
        pytest.skip("the native libraries are not built")
    random_ = random.Random(seed())
    for sets, dim, keys in ((1, 3, 30), (5, 16, 90), (64, 4, 900)):
        play([PlainRows(sets), NativeRows(native, sets, dim)], dim, 400, keys, random_)
    play([NativeRows(native, 4, 8), KernelRows(device_rows, 4, 8, device)], 8, 12, 60, random_)


@pytest.mark.parametrize(("n", "keys", "dim"), [(1, 1, 1), (70, 9, 5), (40, 40, 16), (30, 3, 200)])
def test_sums_by_key_are_added_in_the_order_of_the_ids(
    device_rows: ModuleType, device: torch.device, n: int, keys: int, dim: int
) -> None:
    random_ = random.Random(seed())
    inverse = list(range(keys)) + [random_.randrange(keys) for _ in range(n - keys)]
    random_.shuffle(inverse)
    grads = torch.randn(n, dim, generator=torch.Generator().manual_seed(random_.randrange(2**32)))
    expected: dict[int, Tensor] = {}
    for key, grad in zip(inverse, grads, strict=True):
        expected[key] = expected[key] + grad if key in expected else grad
    sums = device_rows.sum_by_key(grads.to(device), torch.tensor(inverse, device=device)).cpu()
    assert torch.equal(sums, torch.stack([expected[key] for key in range(keys)]))


def test_no_keys_are_nothing(device_rows: ModuleType, device: torch.device) -> None:
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert device_rows.sum_by_key(torch.empty(0, 4, device=device), empty).shape == (0, 4)


@pytest.mark.parametrize("factor", [0, 2**20])
def test_a_size_that_the_device_cannot_have_is_refused(
    device_rows: ModuleType, device: torch.device, factor: int
) -> None:
    size = 7 * device_rows.DeviceRows.bytes_per_row(4) + factor * 2**32
    with pytest.raises(ValueError, match=rf"capacity_bytes: {size} is not allowed for dim 4 on {device}; allowed: "):
        device_rows.DeviceRows(size, 4, device)
