"""Calls and commits in another worker's name, by a client of the same cluster that knows its numbers."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from restart_scene import Scene
from sparserow.proto.control import ControlClient
from sparserow.proto.security.security import Security
from sparserow.worker.api.session import Session
from sparserow.worker.membership.shard_client import shard_client
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
            with pytest.raises(sr.errors.FailedPrecondition, match="proof: the bytes are not the proof of worker"):
                call(forged)
        schema = next(schema for schema in control.list_tables("ads") if schema.name == "user")
        rows = np.full((len(KEYS), DIM), 9, np.float32)
        client = shard_client(control.cluster(), Security(), forged)
        for write in (
            lambda: client.push(schema.id, KEYS, rows, dim=DIM, lr=1.0, sequence=1 << 40, deadline_ms=5000),
            lambda: client.assign(schema.id, KEYS, rows, dim=DIM, sequence=1 << 40, deadline_ms=5000),
            lambda: client.erase(schema.id, KEYS, sequence=1 << 40, deadline_ms=5000),
        ):
            with pytest.raises(sr.errors.FailedPrecondition, match="has not proved"):
                write()
    np.testing.assert_array_equal(table.pull(KEYS), before)


def test_a_worker_is_spoken_for_by_itself_alone(launcher: Launcher, tmp_path: Path) -> None:
    scene = Scene(launcher, tmp_path)
    address = scene.address
    with sr.connect(address, "ads", job="train", staleness=None) as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=0.5))
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


def test_the_state_has_the_digest_of_a_proof_for_its_owner_alone(launcher: Launcher, tmp_path: Path) -> None:
    scene = Scene(launcher, tmp_path)
    state = tmp_path / "state.json"
    with sr.connect(scene.address, "ads", job="train", staleness=None) as session:
        assert session.core.identity is not None
        proof = session.core.identity.proof
        assert len(proof) == 16
        wait_until(lambda: hashlib.sha256(proof).hexdigest() in state.read_text(), "the state")
        assert proof.hex() not in state.read_text()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("state.json*")} == {0o600}
