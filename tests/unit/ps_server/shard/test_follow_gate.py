"""Followers of refused tables wait, and no others."""

from __future__ import annotations

import threading

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.errors import DeadlineExceeded, Unavailable
from sparserow.ps_server.shard.follow_gate import FollowGate

REFUSAL = pb.Refusal(code=Unavailable.number, message="being loaded", table_ids=[3, 4])


def opened() -> FollowGate:
    gate = FollowGate(0)
    gate.open()
    return gate


def test_a_shard_without_a_route_refuses_everybody() -> None:
    for tables in ([], [7]):
        with pytest.raises(Unavailable, match="no route yet"), FollowGate(0).look(tables):
            pass


def test_followers_of_other_tables_go_on() -> None:
    gate = opened()
    with gate.look([7]):
        gate.close(REFUSAL, 0.0)  # the look under way is at another table
        with gate.look([1, 7]):
            pass
    for tables in ([], [4], [1, 3]):
        with pytest.raises(Unavailable, match="being loaded"), gate.look(tables):
            pass
    gate.open()
    with gate.look([]), gate.look([4]):
        pass


@pytest.mark.parametrize("tables", [[], [3], [4, 9]])
def test_looks_under_way_at_refused_tables_are_waited_for(tables: list[int]) -> None:
    gate = opened()
    inside, leave = threading.Event(), threading.Event()

    def look() -> None:
        with gate.look(tables):
            inside.set()
            leave.wait(60)

    looking = threading.Thread(target=look)
    looking.start()
    assert inside.wait(60)
    with pytest.raises(DeadlineExceeded, match="still being read"):
        gate.close(REFUSAL, 0.01)
    leave.set()
    gate.close(REFUSAL, 60.0)
    looking.join()
