"""A worker's place in its job while shards come back: it is kept, whatever else is under way."""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from sparserow.proto import control_pb2 as pb, control_pb2_grpc as pb_grpc
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import Unavailable
from sparserow.proto.grpc_status import status_of_error
from sparserow.proto.security.security import Security
from sparserow.proto.worker_identity import WorkerIdentity
from sparserow.worker.membership.lease import Lease
from sparserow_process import wait_until

LEASE_SEC = 0.3


class Coordinator(pb_grpc.CoordinatorServicer):
    """One shard has come back, another one is away."""

    def __init__(self) -> None:
        self.heartbeats = 0
        self.is_ready = self.has_busy = False
        self.told_busy: list[bool] = []
        self.figures = pb.TrainingFigures()
        self.acknowledged: list[int] = []

    def WorkerHeartbeat(self, request: pb.WorkerHeartbeatRequest, _: Any) -> pb.WorkerHeartbeatReply:
        self.heartbeats += 1
        self.told_busy.append(request.busy)
        self.figures = request.figures
        return pb.WorkerHeartbeatReply(
            lease_sec=LEASE_SEC, restoring=not self.is_ready, shard_processes=7, peer_busy=self.has_busy
        )

    def GetCluster(self, _: pb.GetClusterRequest, context: Any) -> pb.GetClusterReply:
        if not self.is_ready:
            code, message, metadata = status_of_error(Unavailable("shard 1: its process sends no heartbeat"))
            context.set_trailing_metadata(metadata)
            context.abort(code, message)
        shards = [pb.ShardAddress(shard=0, data=pb.Address(host="127.0.0.1", port=7))]
        return pb.GetClusterReply(
            cluster_id=1, route=pb.Route(epoch=1, slot_count=2, runs=[pb.SlotRun(start=0, shard=0)]), shards=shards
        )

    def DeregisterWorker(self, request: pb.DeregisterWorkerRequest, _: Any) -> pb.DeregisterWorkerReply:
        self.acknowledged = list(request.acknowledged)
        return pb.DeregisterWorkerReply()


class Native:
    step = 5


class Client:
    def __init__(self) -> None:
        self.moves: list[tuple[int, str, int]] = []
        self.touches = self.extensions = 0

    def extend(self, *, grace_ms: int) -> None:
        assert grace_ms > 0
        self.extensions += 1

    def move(self, shard: int, host: str, port: int) -> None:
        self.moves.append((shard, host, port))

    def acknowledged_commits(self) -> list[int]:
        return [3]

    def touch(self, *, deadline_ms: int) -> None:
        assert deadline_ms > 0
        self.touches += 1


def test_the_lease_is_renewed_while_one_shard_is_back_and_another_one_is_away() -> None:
    coordinator, client = Coordinator(), Client()
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_CoordinatorServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    control = ControlClient(f"127.0.0.1:{port}", patience_sec=60.0)
    lease = Lease(control, WorkerIdentity(1, 1, 1, lease_sec=LEASE_SEC, first_step=0, namespace_id=1))
    lease.follow(Native(), client, 30.0, Security())  # type: ignore[arg-type]
    wait_until(lambda: coordinator.heartbeats >= 5, "heartbeats")
    assert client.moves == []
    coordinator.is_ready = True
    wait_until(lambda: client.touches, "the shard to be asked at its address")
    assert client.moves == [(0, "127.0.0.1", 7)]
    lease.end()
    assert coordinator.acknowledged == [3], "it says what the shards have of it"
    server.stop(None)


def test_a_shard_that_is_away_is_not_told_as_the_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    coordinator, client = Coordinator(), Client()
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_CoordinatorServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    lease = Lease(ControlClient(f"127.0.0.1:{port}"), WorkerIdentity(1, 1, 1, LEASE_SEC, 0, 1))
    with caplog.at_level(logging.WARNING, "sparserow.worker.membership.lease"):
        lease.follow(Native(), client, 30.0, Security())  # type: ignore[arg-type]
        wait_until(lambda: coordinator.heartbeats >= 4, "heartbeats")
        coordinator.is_ready = True
        wait_until(lambda: client.touches, "the shard to be asked at its address")
        lease.end()
    server.stop(None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("a shard cannot be reached: shard 1: its process sends no heartbeat")


def test_calls_wait_for_a_busy_worker_as_long_as_it_moves() -> None:
    coordinator, client = Coordinator(), Client()
    coordinator.is_ready = True
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_CoordinatorServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    lease = Lease(ControlClient(f"127.0.0.1:{port}"), WorkerIdentity(1, 1, 1, LEASE_SEC, 0, 1))
    lease.follow(Native(), client, 1.0, Security())  # type: ignore[arg-type]
    wait_until(lambda: coordinator.heartbeats >= 2, "heartbeats")
    assert client.extensions == 0
    coordinator.has_busy = True
    wait_until(lambda: client.extensions >= 2, "the deadlines to be extended")
    assert not any(coordinator.told_busy)
    lease.note_work(True)
    wait_until(lambda: coordinator.told_busy[-1], "that this one is busy")
    wait_until(lambda: not coordinator.told_busy[-1], "that one that hangs is busy no more")
    lease.note_work(True)
    wait_until(lambda: coordinator.told_busy[-1], "that this one is busy")
    lease.note_work(False)
    wait_until(lambda: not coordinator.told_busy[-1], "the end of it")
    lease.end()
    server.stop(None)


def test_losses_that_are_no_numbers_are_left_out_of_what_it_reports() -> None:
    coordinator = Coordinator()
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_CoordinatorServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    lease = Lease(ControlClient(f"127.0.0.1:{port}"), WorkerIdentity(1, 1, 1, LEASE_SEC, 0, 1))
    for loss_sum in (6.0, math.nan, math.inf, 4.0):
        lease.note_trained(10, loss_sum)
    lease.note_auc(0.75)
    lease.note_test("click.auc" + "x" * 300, 0.5)
    wait_until(lambda: coordinator.figures.samples == 40, "a heartbeat")
    told = coordinator.figures
    assert (told.measured, told.loss_sum, told.auc, told.test_value) == (20, 10.0, 0.75, 0.5)
    assert told.test_metric == "click.auc" + "x" * 246, "a name of 255 characters"
    lease.note_auc(math.nan)
    wait_until(lambda: not coordinator.figures.HasField("auc"), "a heartbeat without it")
    lease.end()
    server.stop(None)
