"""Calls for another follower's cursor, by a peer that may follow too: nothing of what the owner has not got is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import sparserow as sr
from sparserow.proto import changes_pb2 as pb, changes_pb2_grpc as pb_grpc
from sparserow.proto.control import ControlClient

DIM = 4
KEYS = np.arange(200, dtype=np.uint64)


class Scene:
    """A shard with a table, and a connection to it as a follower has one."""

    def __init__(self, cluster: sr.LocalCluster, session: Any, stub: Any, cluster_id: int, slot_count: int) -> None:
        self.cluster, self.stub, self.cluster_id = cluster, stub, cluster_id
        self.table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=0.5))
        self.nothing = np.zeros(slot_count, "<u8").tobytes()

    def open(self, name: str, **fields: Any) -> bytes:
        request = pb.OpenCursorRequest(
            cursor=name, cluster_id=self.cluster_id, versions=self.nothing, idle_sec=60, **fields
        )
        return self.stub.OpenCursor(request, timeout=30).key

    def read(
        self, name: str, key: bytes = b"", slots: np.ndarray | None = None, versions: np.ndarray | None = None
    ) -> Any:
        request = pb.ReadChangesRequest(cursor=name, key=key, max_bytes=8 << 20, wait_ms=0)
        if slots is not None and versions is not None:
            request.acked_slots, request.acked_versions = (
                slots.astype("<u4").tobytes(),
                versions.astype("<u8").tobytes(),
            )
        return self.stub.ReadChanges(request, timeout=30)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with (
        sr.local_cluster(shards=1) as cluster,
        sr.connect(cluster.address, "ads", staleness=None) as session,
        ControlClient(cluster.address) as control,
    ):
        (shard,) = control.status().shards
        view = control.cluster()
        with grpc.insecure_channel(f"{shard.control.host}:{shard.control.port}") as channel:
            stub = pb_grpc.ChangesStub(channel)
            yield Scene(cluster, session, stub, view.cluster_id, view.slot_count)


def refusal(call: Any) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return str(refused.value.details())


def test_nobody_else_acknowledges_reads_closes_or_opens_a_cursor(scene: Scene) -> None:
    key = scene.open("victim", is_owned=True)
    scene.table.assign(KEYS, np.ones((len(KEYS), DIM), np.float32))
    slots = np.arange(len(scene.nothing) // 8)
    everything = np.full(len(slots), (1 << 63) - 1)
    for forged in (b"", bytes(16), b"x" * 16):
        for call in (
            lambda forged=forged: scene.read("victim", forged, slots, everything),
            lambda forged=forged: scene.read("victim", forged),
            lambda forged=forged: scene.stub.CloseCursor(
                pb.CloseCursorRequest(cursor="victim", key=forged), timeout=30
            ),
            lambda forged=forged: scene.open("victim", key=forged, is_owned=True),
            lambda forged=forged: scene.open("victim", key=forged),
        ):
            assert "belongs to another follower" in refusal(call)
    reply = scene.read("victim", key)
    assert reply.slots > 0
    assert reply.acknowledged == 0
    scene.stub.CloseCursor(pb.CloseCursorRequest(cursor="victim", key=key), timeout=30)


def test_a_publishers_cursor_is_not_read_or_closed_by_others(scene: Scene) -> None:
    request = pb.GetVersionsRequest(cluster_id=scene.cluster_id, cursor="published", idle_sec=60)
    for _ in range(2):  # it may publish again
        scene.stub.GetVersions(request, timeout=30)
    assert "belongs to another follower" in refusal(lambda: scene.read("published"))
    close = pb.CloseCursorRequest(cursor="published")
    assert "belongs to another follower" in refusal(lambda: scene.stub.CloseCursor(close, timeout=30))


def test_an_acknowledgement_in_a_followers_name_is_counted(scene: Scene) -> None:
    key = scene.open("counted", is_owned=True)
    scene.table.assign(KEYS, np.full((len(KEYS), DIM), 2, np.float32))
    scene.read("counted", key)
    thief = scene.read("counted", key, np.arange(5), np.ones(5))  # the key was stolen
    assert thief.acknowledged == 5
    assert scene.read("counted", key).acknowledged == 5  # the owner, which has acknowledged nothing, sees that


def test_a_follower_of_the_version_before_still_follows(scene: Scene) -> None:
    assert scene.open("old") == b""
    assert scene.read("old").acknowledged == 0
    scene.stub.CloseCursor(pb.CloseCursorRequest(cursor="old"), timeout=30)


def test_cursors_have_a_bound_and_so_has_their_idle_time(scene: Scene) -> None:
    opened = 0
    words = ""
    while not words:
        try:
            scene.open(f"many {opened}", is_owned=True)
            opened += 1
        except grpc.RpcError as error:
            words = str(error.details())
    assert "allowed: 1024 in all" in words
    assert opened <= 512
    too_long = pb.OpenCursorRequest(
        cursor="idle", cluster_id=scene.cluster_id, versions=scene.nothing, idle_sec=1 << 31
    )
    unnamed = pb.OpenCursorRequest(cluster_id=scene.cluster_id, versions=scene.nothing, idle_sec=60)
    assert "the name of a cursor" in refusal(lambda: scene.stub.OpenCursor(unnamed, timeout=30))
    for method in (scene.stub.OpenCursor, scene.stub.GetVersions):
        of_many = (pb.OpenCursorRequest if method is scene.stub.OpenCursor else pb.GetVersionsRequest)(
            cursor="many", cluster_id=scene.cluster_id, table_ids=range(5000), idle_sec=60
        )
        assert "table_ids: there are 5000; allowed: at most 4096" in refusal(
            lambda method=method, of_many=of_many: method(of_many, timeout=30)  # type: ignore[misc]
        )
    assert "allowed: [1, 86400]" in refusal(lambda: scene.stub.OpenCursor(too_long, timeout=30))
