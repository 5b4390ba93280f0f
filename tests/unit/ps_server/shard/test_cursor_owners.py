"""Cursors of followers: whose they are, how many an account may have, and what becomes of idle ones."""

from __future__ import annotations

import pytest

from sparserow.proto.errors import FailedPrecondition, ResourceExhausted
from sparserow.ps_server.shard.cursor_owners import CursorOwners


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_who_shows_the_key_reads_acknowledges_opens_anew_and_closes() -> None:
    owners = CursorOwners(clock=Clock())
    key = owners.open("a", b"", "one", 10, is_owned=True)
    assert len(key) == 16
    for wrong in (b"", bytes(16), key[:-1]):
        for call in (
            lambda wrong=wrong: owners.use("a", wrong, 5),
            lambda wrong=wrong: owners.close("a", wrong),
            lambda wrong=wrong: owners.open("a", wrong, "two", 10, is_owned=True),
            lambda wrong=wrong: owners.open("a", wrong, "two", 10, is_owned=False),
        ):
            with pytest.raises(FailedPrecondition, match="belongs to another follower"):
                call()
    assert owners.use("a", key, 3) == 3
    assert owners.use("a", key, 4) == 7
    assert owners.open("a", key, "one", 10, is_owned=True) == key
    assert owners.use("a", key) == 0  # counted from its opening
    owners.close("a", key)
    owners.close("a", b"")  # harmless
    assert owners.use("a", b"", 5) == 0


def test_a_follower_of_the_version_before_has_a_cursor_that_is_everybodys() -> None:
    owners = CursorOwners(clock=Clock())
    assert owners.open("a", b"", "one", 10, is_owned=False) == b""
    assert owners.use("a", b"", 2) == 2
    key = owners.open("a", b"", "one", 10, is_owned=True)  # the follower was upgraded
    with pytest.raises(FailedPrecondition):
        owners.use("a", b"", 2)
    owners.close("a", key)


def test_an_account_has_its_share_and_idle_cursors_end() -> None:
    clock = Clock()
    owners = CursorOwners(most=20, clock=clock)
    for opened in range(10):
        owners.open(f"greedy {opened}", b"", "greedy", 10, is_owned=True)
    with pytest.raises(ResourceExhausted, match="allowed: 20 in all"):
        owners.open("one more", b"", "greedy", 10, is_owned=True)
    key = owners.open("honest", b"", "honest", 100, is_owned=True)
    clock.now = 11.0
    owners.open("greedy again", b"", "greedy", 10, is_owned=True)
    assert owners.use("honest", key, 1) == 1
