"""Random pushes, deletions and sweeps of a table with admission and eviction: a store with an SSD and one without
remember and keep the same rows, bit for bit, and those that exact counts say. The seed is printed."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from long_form import FULL
from sparserow.cpp_ext import _server
from sparserow.proto.errors import error_of
from sparserow.proto.native import policy_parameters
from sparserow.proto.schema import RowPolicy

ROUNDS = 6000 if FULL else 400
KEYS = 40_000 if FULL else 8_000
DIM = 8
SLOTS = 64
TABLE = 1
VERSIONS = 1  # which of contents()
BUDGET = (1600 if FULL else 400) << 10  # bytes in memory, filters included
# Keys of which the store may judge otherwise than exact counts: a filter keeps 24 bits of a key, and takes some two
# keys of a slot for one in every thirtieth run (0.8 pairs in a full one). Of such a pair one gets its row early, which
# makes the filter forget the other.
MISTAKEN = 16 if FULL else 4

POLICIES = {
    "counted": RowPolicy(admit_after=3, evict_after_steps=40),
    "coin": RowPolicy(admit_probability=0.3, evict_after_steps=60),
    "small": RowPolicy(evict_below_norm=0.3),
    "bounded_lru": RowPolicy(max_rows=KEYS // 4),
    "bounded_lfu": RowPolicy(admit_after=2, max_rows=KEYS // 4, evict_by="lfu"),
}


def make_store(policy: RowPolicy, **options: object) -> _server.Store:
    _server.set_error_factory(error_of)
    store = _server.Store(slot_count=SLOTS, **options)
    store.create_table(
        _server.TableSchema(
            id=TABLE,
            name="n/t",
            dim=DIM,
            seed=5,
            init=_server.InitSpec(kind="uniform", a=-0.1, b=0.1),
            optimizer=_server.OptimizerSpec(kind="adagrad", eps=1e-8),
            policy=policy_parameters(policy),
        )
    )
    return store


class Exact:
    """What the policy says, with exact counts. Coins are not known to it: it takes the store's word for them."""

    def __init__(self, policy: RowPolicy) -> None:
        self.policy = policy
        self.rows: dict[int, int] = {}  # key -> step of its last push
        self.updates: Counter[int] = Counter()
        self.seen: Counter[int] = Counter()
        self.refused = 0

    def push(self, keys: list[int], step: int) -> None:
        for key in keys:
            if key not in self.rows:
                self.seen[key] += 1
                if self.seen[key] < self.policy.admit_after:
                    self.refused += 1
                    continue
                del self.seen[key]
            self.rows[key] = step
            self.updates[key] += 1

    def forget(self, keys: list[int]) -> int:
        gone = {key for key in keys if key in self.rows}
        for key in gone:
            del self.rows[key], self.updates[key]
        return len(gone)

    def old(self, step: int) -> list[int]:
        after = self.policy.evict_after_steps
        return [key for key, last in self.rows.items() if after and step - last >= after]


def contents(store: _server.Store) -> tuple[np.ndarray, ...]:
    pages, cursor = [], 0
    while True:
        *arrays, cursor = store.scan(TABLE, cursor=cursor, max_rows=3000, with_state=True)
        pages.append(arrays)
        if cursor == 0:
            return tuple(np.concatenate([page[i] for page in pages if len(page[0])] or [pages[0][i]]) for i in range(5))


@pytest.mark.parametrize("name", POLICIES)
def test_both_stores_keep_what_the_policy_says(name: str, tmp_path: Path) -> None:
    policy = POLICIES[name]
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"{name}: seed {seed}, {ROUNDS} rounds")
    rng = np.random.default_rng(seed)
    tiered = make_store(policy, memory_budget_bytes=BUDGET, ssd_path=str(tmp_path), cluster_id=2)
    plain = make_store(policy)
    exact = Exact(policy)
    pool = rng.integers(2**63, size=KEYS, dtype=np.uint64)
    mistaken: set[int] = set()
    most_mistaken = MISTAKEN if policy.admit_after > 1 else 0
    for step in range(ROUNDS):
        size = int(rng.choice([5, 50, 200]))
        keys = np.unique(rng.choice(pool[: KEYS // 50] if rng.random() < 0.3 else pool, size=size))
        act = rng.random()
        if act < 0.75:
            grads = rng.standard_normal((len(keys), DIM)).astype(np.float32)
            for store in (tiered, plain):
                store.apply(TABLE, keys, grads, lr=0.05, job=3, step=step)
            exact.push(keys.tolist(), step)
        elif act < 0.8:
            for store in (tiered, plain):  # the clock goes on, whatever else happens
                store.apply(TABLE, keys[:0], np.zeros((0, DIM), np.float32), lr=0.05, job=3, step=step)
            erased = tiered.erase(TABLE, keys)
            assert erased == plain.erase(TABLE, keys)
            if policy.admit_probability == 1:
                assert abs(erased - exact.forget(keys.tolist())) <= most_mistaken
        elif act < 0.9:
            for store in (tiered, plain):
                store.apply(TABLE, keys[:0], np.zeros((0, DIM), np.float32), lr=0.05, job=3, step=step)
            planned = [tiered.sweep(TABLE, dry_run=True), plain.sweep(TABLE, dry_run=True)]
            done = [tiered.sweep(TABLE), plain.sweep(TABLE)]
            freed = [[(rule.rows, rule.bytes) for rule in report.freed] for report in (*planned, *done)]
            assert freed[0] == freed[1] == freed[2] == freed[3]
            if policy.evict_after_steps and policy.admit_probability == 1:
                assert abs(freed[0][0][0] - exact.forget(exact.old(step))) <= most_mistaken
        else:
            left, right = tiered.pull(TABLE, keys), plain.pull(TABLE, keys)
            for one, other in zip(left, right, strict=True):
                np.testing.assert_array_equal(one, other)
        if policy.max_rows and act >= 0.8:
            found = set(contents(plain)[0].tolist())
            for key in [key for key in exact.rows if key not in found]:
                exact.forget([key])  # which of equals go, the store decides
        if policy.evict_below_norm and 0.8 <= act < 0.9:
            found_keys, _, _, rows, _ = contents(plain)
            assert (np.linalg.norm(rows.astype(np.float64), axis=1) >= 0.3).all()
            exact.forget(list(set(exact.rows) - set(found_keys.tolist())))
        if step % 100 == 99 and policy.admit_probability == 1:
            mistaken |= set(contents(plain)[0].tolist()) ^ set(exact.rows)
            assert len(mistaken) <= most_mistaken
    left, right = contents(tiered), contents(plain)
    for array, (one, other) in enumerate(zip(left, right, strict=True)):
        if array == VERSIONS:  # of the rows of one push, one that waits for the SSD may get its version after others
            one, other = np.sort(one), np.sort(other)
        np.testing.assert_array_equal(one, other)
    stats = [store.stats()[0] for store in (tiered, plain)]
    assert stats[0].swept_rows == stats[1].swept_rows
    assert stats[0].refused == stats[1].refused
    assert [stats[0].filter_entries, stats[0].filter_bytes] == [stats[1].filter_entries, stats[1].filter_bytes]
    for slot in range(0, SLOTS, 7) if policy.admit_after > 1 else ():
        np.testing.assert_array_equal(tiered.filter_image(TABLE, slot), plain.filter_image(TABLE, slot))
    tier = tiered.tier_stats()
    assert tier is not None
    print(
        f"rows {stats[0].rows:,}, refused {stats[0].refused:,}, swept {stats[0].swept_rows}, "
        f"evicted {tier['rows_evicted']:,}"
    )
    if name == "counted":
        assert abs(stats[0].refused - exact.refused) <= 8 * len(mistaken) + 2
    assert sum(stats[0].swept_rows) > 0
