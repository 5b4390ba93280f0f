"""The directory of the rows that a device keeps, against a dict: on the host by torch's own operations."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from sparserow.cpp_ext.device.row_directory import WAYS, RowDirectory

HOST, DIM, TTL = torch.device("cpu"), 3, 50


def seed() -> int:
    given = os.environ.get("SPARSEROW_TEST_SEED")
    chosen = random.randrange(2**32) if given is None else int(given)
    print(f"SPARSEROW_TEST_SEED={chosen}")
    return chosen


class Kept:
    """A directory with its store, and what was put there last."""

    def __init__(self, tables: int, sets: int) -> None:
        self.directory = RowDirectory(tables, sets, HOST)
        self.store = torch.full((self.directory.places, DIM), float("nan"))
        self.newest: dict[tuple[int, int], tuple[int, np.ndarray]] = {}

    def put(self, table: int, keys: np.ndarray, asked: int, draw: np.random.Generator) -> np.ndarray:
        rows = draw.random((len(keys), DIM), dtype=np.float32)
        places = self.directory.put(keys, self.directory.first_set(table), asked)
        kept = np.flatnonzero(places >= 0)
        assert len(np.unique(places[kept])) == len(kept), "two rows at one place"
        self.directory.write(
            self.store,
            torch.from_numpy(rows[kept]),
            torch.from_numpy(keys[kept]),
            torch.from_numpy(places[kept]),
            asked,
        )
        for i in kept:
            self.newest[table, int(keys[i])] = (asked, rows[i])
        return places

    def probe(self, table: int, keys: np.ndarray, now: int) -> tuple[np.ndarray, np.ndarray, int]:
        firsts = torch.full((len(keys),), self.directory.first_set(table))
        places, found, ages = self.directory.probe(torch.from_numpy(keys), firsts, now, TTL)
        return self.store[places].numpy(), found.numpy(), int(ages)


@pytest.mark.parametrize("sets", [1, 3, 64])
def test_what_is_found_is_what_was_put_last_and_young_enough(sets: int) -> None:
    draw = np.random.default_rng(seed())
    kept, now, hits = Kept(3, sets), 0, 0
    span = [-(2**62), 0, 7, 2**63 - 1, *draw.integers(-(2**63), 2**63 - 1, 40 * sets).tolist()]
    for _ in range(150):
        now += int(draw.integers(0, 20))
        table = int(draw.integers(3))
        keys = draw.choice(np.array(span, np.int64), int(draw.integers(1, 30)), replace=False)
        rows, found, ages = kept.probe(table, keys, now)
        expected_age = 0
        for key, row, is_found in zip(keys.tolist(), rows, found, strict=True):
            if is_found:
                asked, newest = kept.newest[table, key]
                assert now - asked <= TTL
                np.testing.assert_array_equal(row, newest)
                expected_age += now - asked
        assert ages == expected_age
        hits += int(found.sum())
        kept.put(table, keys[~found], now, draw)
    assert hits > 5


def test_rows_that_were_put_are_found_while_they_are_young() -> None:
    draw = np.random.default_rng(1)
    kept, keys = Kept(2, 64), np.arange(100, dtype=np.int64)
    places = kept.put(1, keys, 1000, draw)
    assert (places >= 0).mean() > 0.95  # a set may have more than eight of them
    _, found, _ = kept.probe(1, keys, 1000 + TTL)
    np.testing.assert_array_equal(found, places >= 0)
    assert not kept.probe(1, keys, 1001 + TTL)[1].any()
    assert not kept.probe(0, keys, 1000)[1].any(), "of another table"


def test_the_row_that_was_asked_for_longest_ago_makes_room() -> None:
    draw = np.random.default_rng(2)
    kept = Kept(1, 1)
    for asked, key in enumerate(range(WAYS)):
        kept.put(0, np.array([key]), asked, draw)
    kept.put(0, np.array([1]), 10, draw)  # is young again
    kept.put(0, np.array([100, 101]), 11, draw)
    found = kept.probe(0, np.array([0, 1, 2, 3, 100, 101]), 11)[1]
    assert found.tolist() == [False, True, False, True, True, True]


def test_more_rows_than_a_set_has_places_are_not_all_kept() -> None:
    kept = Kept(1, 1)
    places = kept.put(0, np.arange(3 * WAYS), 5, np.random.default_rng(3))
    assert sorted(places[places >= 0]) == list(range(WAYS))


def test_a_row_of_an_older_request_does_not_take_the_place_of_a_newer_one() -> None:
    draw = np.random.default_rng(4)
    kept = Kept(1, 4)
    kept.put(0, np.array([9]), 20, draw)
    newest = kept.newest[0, 9]
    assert kept.put(0, np.array([9]), 19, draw).tolist() == [-1]
    rows, found, _ = kept.probe(0, np.array([9]), 20)
    assert found.all()
    np.testing.assert_array_equal(rows[0], newest[1])
