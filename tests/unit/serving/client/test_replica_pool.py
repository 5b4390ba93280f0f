"""Which replica a client asks: each in its turn, and those that failed after the others."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from sparserow.proto.errors import DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from sparserow.serving.client import replica_pool
from sparserow.serving.client.replica_map import ReplicaMap
from sparserow.serving.client.replica_pool import ReplicaPool, ReplicaPoolOptions, ReplicaRequest


class Replica:
    """Answers one row, or with an error; ``asked`` holds the deadlines it was given."""

    def __init__(self, number: int) -> None:
        self.number, self.code = number, 0
        self.asked: list[int] = []

    def lookup(self, _: int, tables: Any, *, deadline_ms: int) -> Any:
        assert len(tables) == 1
        self.asked.append(deadline_ms)
        answered = np.full(1, self.code == 0)
        return [(np.zeros((1, 1)), np.zeros(1), answered, answered)], [(1, self.code, f"replica {self.number}")]


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> list[Replica]:
    made = [Replica(number) for number in range(3)]
    endpoints = (tuple(("127.0.0.1", 7000 + number) for number in range(3)),)
    view = ReplicaMap(np.zeros(2, np.uint16), 1, endpoints, {}, {})
    monkeypatch.setattr(replica_pool, "fetch_view", lambda *_, **__: view)
    monkeypatch.setattr(ReplicaPool, "_connect", lambda *_: [[replica] for replica in made])
    return made


def asked(seconds: float = 60.0) -> ReplicaRequest:
    return ReplicaRequest(7, [(1, 1, 1, np.zeros(1, np.uint64))], time.monotonic() + seconds)


@pytest.mark.parametrize("hedge_ms", [None, 10_000.0])
def test_replicas_take_turns(replicas: list[Replica], hedge_ms: float | None) -> None:
    pool = ReplicaPool(ReplicaPoolOptions(("127.0.0.1:1",), hedge_ms=hedge_ms, refresh_sec=600))
    for _ in range(30):
        pool.ask(asked())
    assert [len(replica.asked) for replica in replicas] == [10, 10, 10]
    pool.close()


@pytest.mark.parametrize("code", [Unavailable.number, DeadlineExceeded.number])
def test_one_that_fails_is_asked_after_the_others(replicas: list[Replica], code: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(replica_pool, "_ASIDE_SEC", 600.0)
    replicas[1].code = code
    pool = ReplicaPool(ReplicaPoolOptions(("127.0.0.1:1",), refresh_sec=600))
    for _ in range(30):
        assert pool.ask(asked())[1][0][1] == 0
    assert len(replicas[1].asked) == 1
    # It got half of the time, as others were well.
    assert replicas[1].asked[0] <= 30_000 < 59_000
    assert sum(len(replica.asked) for replica in replicas) == 31
    replicas[0].code = replicas[2].code = code
    replicas[1].code = 0
    assert pool.ask(asked())[1][0][1] == 0, "the last resort"
    pool.close()


def test_what_all_would_say_is_asked_once(replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.code = InvalidArgument.number
    pool = ReplicaPool(ReplicaPoolOptions(("127.0.0.1:1",), refresh_sec=600))
    assert pool.ask(asked())[1][0][1] == InvalidArgument.number
    assert sum(len(replica.asked) for replica in replicas) == 1
    for replica in replicas:
        replica.code = NotFound.number
    pool.ask(asked())
    assert sum(len(replica.asked) for replica in replicas) == 4
    replicas[0].code = replicas[1].code = replicas[2].code = 0
    before = Counter({replica.number: len(replica.asked) for replica in replicas})
    for _ in range(3):
        pool.ask(asked())
    assert all(len(replica.asked) == before[replica.number] + 1 for replica in replicas), "none is set aside"
    pool.close()
