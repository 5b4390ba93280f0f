"""Calls and commits in another worker's name, by a client of the same cluster that knows its numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from restart_scene import Scene
from sparserow.proto import control_pb2 as pb
from sparserow.proto.control import ControlClient
from sparserow.proto.security.security import Security
from sparserow.proto.worker_identity import WorkerIdentity
from sparserow.worker.membership.shard_client import shard_client
from sparserow.worker.session.session import Session
from sparserow_process import Launcher, wait_until

pytestmark = pytest.mark.started

KEYS = np.arange(50, dtype=np.uint64)
DIM = 4


def check_others_are_refused(address: str, session: Session, table: sr.Table, proof: bytes) -> None:
    """What another client sends in the worker's name changes nothing."""
    assert session.core.identity is not None
    forged = replace(session.core.identity, proof=proof)
    before = table.pull(KEYS)
    with ControlClient(address) as control:
        for call in (
            control.heartbeat_worker,
            control.deregister_worker,
            lambda who: control.report_fault(who, message="m", traceback="t", echo=False, deadline_sec=5),
            lambda who: control.lease_data(who, run="r", epoch=1, epochs=1, chunks=1, done=(), step=1),
        ):
            with pytest.raises(sr.FailedPrecondition, match="proof: the bytes are not the proof of worker"):
                call(forged)
        schema = next(schema for schema in control.list_tables("ads") if schema.name == "user")
        rows = np.full((len(KEYS), DIM), 9, np.float32)
        client = shard_client(control.cluster(), Security(), forged)
        for write in (
            lambda: client.push(schema.id, KEYS, rows, dim=DIM, lr=1.0, sequence=1 << 40, deadline_ms=5000),
            lambda: client.assign(schema.id, KEYS, rows, dim=DIM, sequence=1 << 40, deadline_ms=5000),
            lambda: client.erase(schema.id, KEYS, sequence=1 << 40, deadline_ms=5000),
        ):
            with pytest.raises(sr.FailedPrecondition, match="has not proved"):
                write()
    np.testing.assert_array_equal(table.pull(KEYS), before)


def test_a_worker_is_spoken_for_by_itself_alone(launcher: Launcher, tmp_path: Path) -> None:
    scene = Scene(launcher, tmp_path)
    address = scene.address
    with sr.connect(address, "ads", job="train", staleness=None) as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.SGD(lr=0.5))
        table.push(KEYS, np.ones((len(KEYS), DIM), np.float32))
        for proof in (b"", bytes(16), b"x" * 16):
            check_others_are_refused(address, session, table, proof)
        # The coordinator that comes back knows the proof, and tells it to the shard again.
        scene.kill()
        scene.start()
        wait_until(scene.is_ready, "the shards to come back")
        check_others_are_refused(address, session, table, b"x" * 16)
        table.push(KEYS, np.ones((len(KEYS), DIM), np.float32))
        np.testing.assert_array_equal(table.pull(KEYS), np.full((len(KEYS), DIM), -1.0, np.float32))


def test_a_worker_of_the_version_before_needs_no_proof() -> None:
    with sr.local_cluster(shards=1) as cluster, ControlClient(cluster.address) as control:
        request = pb.RegisterWorkerRequest(namespace="ads", job="old", rank=0, world_size=1)
        reply = control._call("RegisterWorker", request, 30.0)
        assert reply.proof == b""
        identity = WorkerIdentity(
            reply.job_id, reply.worker_id, reply.epoch, reply.lease_sec, reply.first_step, reply.namespace_id
        )
        with sr.connect(cluster.address, "ads", job="maker") as session:
            table = session.create_table("user", dim=DIM, optimizer=sr.SGD(lr=0.5))
            client = shard_client(control.cluster(), Security(), identity)
            ones = np.ones((len(KEYS), DIM), np.float32)
            (schema,) = control.list_tables("ads")
            client.push(schema.id, KEYS, ones, dim=DIM, lr=0.5, sequence=1, deadline_ms=9000)
            np.testing.assert_array_equal(table.pull(KEYS), np.full((len(KEYS), DIM), -0.5, np.float32))
        assert control.heartbeat_worker(identity).lease_sec > 0
        control.deregister_worker(identity)
