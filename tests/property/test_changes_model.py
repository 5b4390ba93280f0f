"""Random writes, erasures and drops on a store, followed by other stores through a log with little room, with pages
that are lost, repeated and come late: whenever a follower has everything, it equals the store, bit for bit, and has
of dropped tables what it had."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from long_form import FULL
from sparserow.cpp_ext import _server
from sparserow.proto.errors import error_of

ROUNDS = 4000 if FULL else 400
DIM = 32
SLOTS = 8
TABLES = (1, 2)
ONE_ROW = 500  # bytes of a page that has one row at most


def make_store(**options: object) -> _server.Store:
    _server.set_error_factory(error_of)
    store = _server.Store(slot_count=SLOTS, **options)
    for table in TABLES:
        create(store, table)
    return store


def create(store: _server.Store, table: int) -> None:
    dtype = "float32" if table == 1 else "bfloat16"
    init = _server.InitSpec(kind="uniform", a=-1.0, b=1.0)
    store.create_table(_server.TableSchema(id=table, name=f"n/t{table}", dim=DIM, dtype=dtype, seed=3, init=init))


Row = tuple[int, bytes]  # its version and its weights


def rows_of(store: _server.Store, tables: Sequence[int] = TABLES) -> dict[tuple[int, int], Row]:
    rows = {}
    for table in tables:
        keys, versions, _, values, _, cursor = store.scan(table, max_rows=1 << 20)
        assert cursor == 0
        for key, version, value in zip(keys.tolist(), versions.tolist(), values, strict=True):
            rows[table, key] = (version, value.tobytes())
    return rows


def test_a_cursor_may_be_opened_later_at_versions_that_were_taken_between_two_looks_of_another() -> None:
    store, other = make_store(), make_store()
    keys = np.arange(100, dtype=np.uint64)
    store.open_cursor("first", store.change_versions())
    store.apply(1, keys, np.ones((100, DIM), np.float32), lr=0.1)  # which the first has not looked at
    taken = store.change_versions()
    store.apply(1, keys, np.ones((100, DIM), np.float32), lr=0.1)
    store.open_cursor("second", taken)
    page, slots, _, _ = store.read_changes("second", max_bytes=1 << 20)
    assert slots == SLOTS
    assert other.apply_changes(page)["rows"] == 100
    assert rows_of(other) == rows_of(store)


class Follower:
    """A store that follows by pages; what it has not acknowledged it may get again.

    hold: options of its cursor that hold rows back.
    """

    def __init__(self, name: str, source: _server.Store, rng: np.random.Generator, **hold: float) -> None:
        self.name, self.source, self.rng, self.hold = name, source, rng, hold
        self.store = make_store()
        self.versions = np.zeros(SLOTS, np.uint64)
        self.begin = 0
        self.parts = 0  # pages that ended within a slot
        self.open()

    def open(self) -> None:
        self.source.open_cursor(self.name, self.versions, tables=TABLES, **self.hold)

    def turn(self, *, faulty: bool) -> bool:
        """One page; False when there is none."""
        most = int(self.rng.choice([1, 5_000, 100_000]))
        page, slots, self.begin, _ = self.source.read_changes(self.name, begin=self.begin, max_bytes=most)
        if slots == 0:
            return False
        assert len(page) <= max(most, ONE_ROW)
        fate = self.rng.random() if faulty else 1.0
        if fate < 0.2:
            return True  # lost on the way
        applied = self.store.apply_changes(page)
        self.parts += applied["part"] > 0
        if fate < 0.3:
            self.store.apply_changes(page)
        if fate < 0.5:
            return True  # the acknowledgement is lost
        self.source.ack_changes(self.name, applied["slots"], applied["positions"], applied["part"])
        self.versions[applied["slots"]] = applied["versions"]
        return True

    def catch_up(self) -> None:
        """Takes everything, also rows that wait."""
        self._take_all()
        if self.hold:
            time.sleep(self.hold["hold_ms"] / 1000)
            self._take_all()

    def _take_all(self) -> None:
        for _ in range(100_000):
            if not self.turn(faulty=False):
                return
        raise AssertionError(f"{self.name} never has everything")


@pytest.mark.parametrize("room", [SLOTS * 1000, 1 << 20])
@pytest.mark.parametrize("tiered", [False, True])
def test_followers_equal_the_store(tmp_path: Path, room: int, tiered: bool) -> None:
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"seed {seed}, room {room}, tiered {tiered}")
    rng = np.random.default_rng(seed)
    tier = {"memory_budget_bytes": 512 << 10, "ssd_path": str(tmp_path), "cluster_id": 5} if tiered else {}
    source = make_store(change_log_bytes=room, **tier)
    holds: dict[str, dict[str, float]] = {
        "at once": {},
        "by move": {"hold_move": 0.3, "hold_ms": 20},
        "by updates": {"hold_updates": 3, "hold_ms": 20},
    }
    followers = [Follower(name, source, rng, **hold) for name, hold in holds.items()]
    checked, drops = 0, 0
    dropped: dict[int, list[dict[tuple[int, int], Row]]] = {}  # by table: what each follower had of it, and keeps

    def check(follower: Follower) -> None:
        place = followers.index(follower)
        wanted = [rows_of(source, [table for table in TABLES if table not in dropped])]
        wanted += [kept[place] for kept in dropped.values()]
        assert rows_of(follower.store) == {name: row for rows in wanted for name, row in rows.items()}

    for number in range(ROUNDS):
        table = int(rng.choice(TABLES))
        if table in dropped and rng.random() < 0.1:
            create(source, table)
            del dropped[table]
        if table in dropped:
            continue
        keys = rng.integers(0, 8000, size=int(rng.choice([1, 20, 300])), dtype=np.uint64)
        act = rng.random()
        if act < 0.55:
            source.apply(table, keys, rng.standard_normal((len(keys), DIM), np.float32), lr=0.1)
        elif act < 0.65:
            source.assign(table, keys, rng.standard_normal((len(keys), DIM), np.float32))
        elif act < 0.9:
            source.erase(table, keys)
        elif act < 0.91 or (drops == 0 and number > ROUNDS // 2):
            source.drop_table(table)
            dropped[table] = [rows_of(follower.store, [table]) for follower in followers]
            drops += 1
        for follower in followers:
            if rng.random() < 0.02:
                source.close_cursor(follower.name)
                follower.open()  # the source has forgotten it: it goes on from what it has
            for _ in range(int(rng.integers(0, 4))):
                follower.turn(faulty=True)
            if rng.random() < 0.03:
                follower.catch_up()
                check(follower)
                checked += 1
        assert source.change_stats()["used_bytes"] <= room
    for follower in followers:
        follower.catch_up()
        check(follower)
    stats = source.change_stats()
    print(f"checked {checked}, drops {drops}, {stats}")
    assert checked > 0
    assert drops > 0
    assert stats["snapshots"] > 0
    assert all(follower.parts > 0 for follower in followers)
    assert (stats["forgotten"] > 0) == (room < 1 << 20)
    assert not tiered or source.tier_stats()["rows_evicted"] > 0


def test_a_store_restored_from_an_earlier_state_replaces_what_its_follower_has() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    first = make_store(lineage=1)
    follower = Follower("a", first, rng)
    keys = np.arange(500, dtype=np.uint64)
    first.assign(1, keys, rng.standard_normal((500, DIM), np.float32))
    kept, versions, _, rows, _, _ = first.scan(1, max_rows=1 << 20)
    first.apply(1, keys[:300], np.ones((300, DIM), np.float32), lr=0.1)
    first.assign(1, keys + np.uint64(1000), rng.standard_normal((500, DIM), np.float32))
    first.erase(1, keys[400:])
    follower.catch_up()
    assert rows_of(follower.store) == rows_of(first)
    restored = make_store(lineage=2)  # goes back before the updates, the births and the deaths
    restored.assign_versions(1, kept, versions, rows)
    follower.source = restored
    follower.open()
    follower.catch_up()
    assert rows_of(follower.store) == rows_of(restored)
    assert len(rows_of(restored)) == 500
    restored.apply(1, keys[:100], np.ones((100, DIM), np.float32), lr=0.1)
    follower.catch_up()
    assert rows_of(follower.store) == rows_of(restored)
