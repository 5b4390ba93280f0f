"""Nodes meet at node 0, one thread each: addresses of earlier starts, nodes that do not come, the end of the job."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch.distributed import TCPStore

from node_threads import run_nodes
from sparserow.deploy.preflight import node_meeting
from sparserow.deploy.preflight.node_check import CheckSettings
from sparserow.deploy.preflight.node_meeting import CheckedNodes, NodeMeeting, NodePlace
from sparserow.deploy.preflight.node_verdict import NodeReport
from sparserow.proto.errors import DeadlineExceeded, Unavailable
from sparserow_process import free_port


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node measures nothing here, and waits for a second where it would wait for half a minute."""
    monkeypatch.setattr(node_meeting, "measure", lambda _, index, *__, **___: NodeReport(index, 1.0, 1.0))
    monkeypatch.setattr(node_meeting, "_SILENCE_SEC", 1.5)
    monkeypatch.setattr(node_meeting, "_PULSE_SEC", 0.1)
    monkeypatch.setattr(node_meeting, "_GRACE_SEC", 0.5)
    monkeypatch.setattr(node_meeting, "_DIAL_SEC", 1.0)


@pytest.fixture
def launchers() -> TCPStore:
    """torchrun's store."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def place(store: TCPStore, node: int, nodes: int) -> NodePlace:
    return NodePlace(node, nodes, 0, 1, node, ("127.0.0.1", store.port), hosts_store=False)


SETTINGS = CheckSettings(timeout_sec=5.0)


def test_all_nodes_learn_the_same_verdict(launchers: TCPStore) -> None:
    found = run_nodes(3, lambda node: NodeMeeting(place(launchers, node, 3), SETTINGS).check())
    assert all(isinstance(each, CheckedNodes) for each in found.values()), found
    assert found[0] == found[1] == found[2]
    assert found[0].good == (0, 1, 2)
    assert found[0].processes == (1, 1, 1)


def test_an_address_of_an_earlier_start_is_tried_again(launchers: TCPStore) -> None:
    launchers.set(node_meeting._WHERE, str(free_port()))

    def work(node: int) -> CheckedNodes:
        time.sleep(0.0 if node else 2.0)
        return NodeMeeting(place(launchers, node, 2), CheckSettings(timeout_sec=15.0)).check()

    found = run_nodes(2, work)
    assert found[0] == found[1]
    assert found[0].good == (0, 1)


def test_a_node_that_does_not_come_is_named(launchers: TCPStore) -> None:
    settings = CheckSettings(timeout_sec=1.5)
    found = run_nodes(2, lambda node: NodeMeeting(place(launchers, node, 3), settings).check())
    assert found[0] == found[1]
    assert found[0].good == (0, 1)
    assert found[0].processes == (1, 1, 0)
    assert found[0].verdict.sentence() == "node 2 is broken: it did not report in time"


def test_a_node_that_falls_silent_is_named(launchers: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()

    def measure(_: Any, index: int, *__: Any, **___: Any) -> NodeReport:
        if index == 1:
            hang.wait(60)
        return NodeReport(index, 1.0, 1.0)

    monkeypatch.setattr(node_meeting, "measure", measure)
    monkeypatch.setattr(CheckSettings, "longest_sec", 0.5)

    def work(node: int) -> CheckedNodes:
        try:
            return NodeMeeting(place(launchers, node, 2), SETTINGS).check()
        finally:
            hang.set()

    found = run_nodes(2, work)
    assert found[0].good == (0,)


def test_node_0_that_cannot_be_reached_is_told_in_time(launchers: TCPStore) -> None:
    settings = CheckSettings(timeout_sec=1.5)
    with pytest.raises(Unavailable, match=r"node 0 at 127\.0\.0\.1 cannot be reached in 2 s \(it has not given its"):
        NodeMeeting(place(launchers, 1, 2), settings)
    gone = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launchers.set(node_meeting._WHERE, str(gone.port))
    with pytest.raises(DeadlineExceeded, match="node 0 said nothing"):
        NodeMeeting(place(launchers, 1, 2), CheckSettings(timeout_sec=0.5)).check()
    nowhere = NodePlace(1, 2, 0, 1, 1, ("127.0.0.1", free_port()), hosts_store=False)
    with pytest.raises(Unavailable, match="torchrun's store at"):
        NodeMeeting(nowhere, settings)


@pytest.mark.parametrize("end", ["well", "badly"])
def test_a_node_that_was_left_out_waits_for_the_end_of_the_job(launchers: TCPStore, end: str) -> None:
    ends: dict[int, float] = {}

    def work(node: int) -> None:
        meeting = NodeMeeting(place(launchers, node, 2), SETTINGS)
        meeting.check()
        if node == 0:  # it hosts the store, and is left out
            try:
                meeting.wait_for_end([1])
            finally:
                ends[0] = time.monotonic()
            return
        with meeting.pulse():
            time.sleep(3.0)  # twice as long as silence may be
            ends[1] = time.monotonic()
            if end == "badly":
                raise RuntimeError("the job failed")

    found = run_nodes(2, work)
    assert ends[0] > ends[1]
    if end == "well":
        assert found == {0: None, 1: None}
    else:
        assert isinstance(found[0], Unavailable)
        assert str(found[1]) == "the job failed"
