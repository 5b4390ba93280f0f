"""Random operations on the store against a plain dict: rows, versions, counts, scans, across growth and shrinkage."""

import numpy as np
import pytest

from long_form import FULL
from sparserow.cpp_ext import _server
from sparserow.proto.errors import ResourceExhausted, error_of

SEEDS = range(20 if FULL else 4)
DIM, LR = 5, np.float32(0.25)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to the nearest value of ``dtype``, as assign does; float32 again."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return values


class Model:
    """What the store should hold: key -> (row, update count)."""

    def __init__(self, store: _server.Store, dtype: str) -> None:
        self.store, self.dtype = store, dtype
        self.rows: dict[int, np.ndarray] = {}
        self.counts: dict[int, int] = {}
        self.versions: dict[int, int] = {}

    def read(self, key: int) -> np.ndarray:
        if key in self.rows:
            return self.rows[key]
        row, version, found = self.store.pull(1, np.array([key], np.uint64))
        assert version[0] == 0
        assert not found[0]
        return row[0]

    def apply(self, keys: np.ndarray, grads: np.ndarray) -> None:
        for key, grad in zip(keys.tolist(), grads, strict=True):
            self.rows[key] = self.read(key) - LR * grad
            self.counts[key] = self.counts.get(key, 0) + 1

    def assign(self, keys: np.ndarray, rows: np.ndarray) -> None:
        for key, row in zip(keys.tolist(), rows, strict=True):
            self.rows[key] = stored(row, self.dtype)
            self.counts.setdefault(key, 0)

    def erase(self, keys: np.ndarray) -> int:
        gone = [key for key in dict.fromkeys(keys.tolist()) if key in self.rows]
        for key in gone:
            del self.rows[key], self.counts[key]
            self.versions.pop(key, None)
        return len(gone)


def make_store(dtype: str = "float32", **options) -> _server.Store:
    _server.set_error_factory(error_of)
    store = _server.Store(**options)
    init = _server.InitSpec(kind="uniform", a=-1.0, b=1.0)
    store.create_table(_server.TableSchema(id=1, name="n/t", dim=DIM, dtype=dtype, seed=11, init=init))
    return store


def scan_all(store: _server.Store, page: int) -> dict[int, tuple[int, int, np.ndarray]]:
    seen: dict[int, tuple[int, int, np.ndarray]] = {}
    cursor = 0
    while True:
        keys, versions, counts, rows, _, cursor = store.scan(1, cursor=cursor, max_rows=page)
        for key, version, count, row in zip(keys.tolist(), versions.tolist(), counts.tolist(), rows, strict=True):
            assert key not in seen
            seen[key] = (version, count, row)
        if cursor == 0:
            return seen


def check_pull(store: _server.Store, model: Model, keys: np.ndarray) -> None:
    rows, versions, found = store.pull(1, keys)
    for key, row, version, is_found in zip(keys.tolist(), rows, versions.tolist(), found.tolist(), strict=True):
        assert is_found == (key in model.rows)
        np.testing.assert_array_equal(row, model.read(key))
        assert version >= model.versions.get(key, 0)
        if is_found:
            model.versions[key] = version


def check_all(store: _server.Store, model: Model, page: int) -> None:
    seen = scan_all(store, page)
    assert seen.keys() == model.rows.keys()
    for key, (_, count, row) in seen.items():
        assert count == model.counts[key]
        np.testing.assert_array_equal(row, model.rows[key])
    assert store.stats()[0].rows == len(model.rows)


@pytest.mark.parametrize("slot_count", [2, 64, 16384])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_operations_equal_a_dict(seed, slot_count):
    print(f"seed {seed}, slot_count {slot_count}")
    rng = np.random.default_rng([seed, slot_count])
    store = make_store(slot_count=slot_count)
    model = Model(store, "float32")
    space = int(rng.choice([50, 2_000, 2**63]))
    used = [np.zeros(1, np.uint64)]

    def some_keys(count: int) -> np.ndarray:
        fresh = rng.integers(space, size=count, dtype=np.uint64)
        known = rng.choice(np.concatenate(used[-30:]), size=count)
        keys = np.where(rng.random(count) < 0.5, fresh, known)
        used.append(keys)
        return keys

    for step in range(200):
        keys = some_keys(int(rng.choice([1, 3, 40, 300])))
        choice = rng.random()
        if choice < 0.4:
            grads = rng.standard_normal((len(keys), DIM), np.float32)
            model_before_births = model.rows.keys() | set()
            model.apply(keys, grads)  # reads initial rows from the store, so before they are born
            store.apply(1, keys, grads, lr=float(LR))
            assert model_before_births <= model.rows.keys()
        elif choice < 0.55:
            rows = rng.standard_normal((len(keys), DIM), np.float32)
            store.assign(1, keys, rows)
            model.assign(keys, rows)
        elif choice < 0.75:
            assert store.erase(1, keys) == model.erase(keys)
        else:
            check_pull(store, model, keys)
        if step % 50 == 49:
            check_all(store, model, page=int(rng.integers(1, 500)))
    check_all(store, model, page=10_000)
    assert store.erase(1, np.array(list(model.rows), np.uint64)) == len(model.rows)
    assert store.used_bytes == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_assigned_rows_read_back_as_the_nearest_stored_value(dtype):
    store = make_store(dtype)
    rng = np.random.default_rng(0)
    keys = rng.integers(2**63, size=3000, dtype=np.uint64)
    rows = (rng.standard_normal((3000, DIM)) * 10.0 ** rng.integers(-9, 4, (3000, 1))).astype(np.float32)
    store.assign(1, keys, rows)
    np.testing.assert_array_equal(store.pull(1, keys)[0], stored(rows, dtype))
    bits = store.pull(1, keys, dtype=dtype)[0]
    halves = rows.astype(np.float16) if dtype == "float16" else (stored(rows, dtype).view(np.uint32) >> 16)
    np.testing.assert_array_equal(bits, halves)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_growth_to_many_rows_and_back_keeps_every_row(dtype):
    store = make_store(dtype)
    rng = np.random.default_rng(5)
    keys = np.unique(rng.integers(2**63, size=300_000, dtype=np.uint64))
    rows = stored(rng.standard_normal((len(keys), DIM), np.float32), dtype)
    order = rng.permutation(len(keys))
    for part in np.array_split(order, 37):
        store.assign(1, keys[part], rows[part])
    np.testing.assert_array_equal(store.pull(1, keys)[0], rows)
    full = store.used_bytes
    gone = order[: len(keys) * 9 // 10]
    assert store.erase(1, keys[gone]) == len(gone)
    kept = order[len(gone) :]
    got, _, found = store.pull(1, keys)
    assert found.sum() == len(kept)
    np.testing.assert_array_equal(got[kept], rows[kept])
    store.assign(1, keys[gone], rows[gone])  # the memory of erased rows is used again
    assert store.used_bytes <= full * 1.1
    np.testing.assert_array_equal(store.pull(1, keys)[0], rows)


def test_a_refused_batch_changes_nothing():
    store = make_store(memory_budget_bytes=2 << 20)
    model = Model(store, "float32")
    rng = np.random.default_rng(9)
    refusals: list[str] = []
    for _ in range(60):
        keys = rng.integers(2**63, size=2000, dtype=np.uint64)
        keys[:50] = list(model.rows)[:50] or keys[:50]
        grads = rng.standard_normal((2000, DIM), np.float32)
        before = (store.used_bytes, store.stats()[0].rows)
        try:
            births = {key: model.read(key) for key in keys.tolist()}
            store.apply(1, keys, grads, lr=float(LR))
        except ResourceExhausted as error:
            refusals.append(str(error))
            assert (store.used_bytes, store.stats()[0].rows) == before
            continue
        for key, grad in zip(keys.tolist(), grads, strict=True):
            births[key] = births[key] - LR * grad
        model.rows.update(births)
        for key in keys.tolist():
            model.counts[key] = model.counts.get(key, 0) + 1
        assert store.used_bytes <= 2 << 20
    assert refusals
    assert all("memory budget of 2.0 MiB" in message for message in refusals)
    check_all(store, model, page=1000)
