"""A job whose name was forgotten comes again: its rows, its clock and its workers are those of the new job alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import sparserow as sr
from restart_scene import DIM, ROWS, AllRows, Scene, status_of
from sparserow.proto.control import ControlClient
from sparserow.proto.security.security import Security
from sparserow.proto.worker_identity import WorkerIdentity
from sparserow.worker.membership.shard_client import shard_client
from sparserow_process import Launcher, wait_until

pytestmark = pytest.mark.started


def distributed(session: sr.Session) -> torch.nn.Module:
    """A model whose rows begin at zero."""
    table = sr.Table(init=sr.Constant(0.0))
    return session.distribute(AllRows(0), optimizer=sr.optim.SGD(lr=1.0), min_rows=100, tables={"*": table})


def steps_of(session: sr.Session, model: torch.nn.Module, count: int) -> None:
    """Takes one from every row with each step."""
    for _ in range(count):
        model().backward()
        session.step()
    session.flush()


def rows_of(address: str) -> np.ndarray:
    """All weights."""
    with sr.connect(address, "nights", job="look", staleness=None) as session:
        (rows,) = distributed(session).eval().children()
        return rows(torch.arange(ROWS)).detach().numpy()


def late_frames_change_nothing(address: str, who: WorkerIdentity, *, knows_what_was_taken: bool) -> None:
    """What a worker of the former job still sends is refused, or answered as taken by shards that took it then."""
    with ControlClient(address) as control:
        (schema,) = control.list_tables("nights")
        client = shard_client(control.cluster(), Security(), who)
        keys, ones = np.arange(ROWS, dtype=np.uint64), np.ones((ROWS, DIM), np.float32)
        if knows_what_was_taken:
            client.push(schema.id, keys, ones, dim=DIM, lr=1.0, sequence=1, deadline_ms=1_000)
        with pytest.raises((sr.errors.Unavailable, sr.errors.Fenced)):
            client.push(schema.id, keys, ones, dim=DIM, lr=1.0, sequence=1 << 40, deadline_ms=1_000)
        with pytest.raises(sr.errors.Fenced, match="is not a member of job"):
            control.heartbeat_worker(who)


@pytest.mark.parametrize("staleness", [2, None])
def test_a_forgotten_name_is_used_again(launcher: Launcher, tmp_path: Path, staleness: int | None) -> None:
    scene = Scene(launcher, tmp_path, "--job-memory=500ms")
    with sr.connect(scene.address, "nights", job="nightly", staleness=staleness) as session:
        steps_of(session, distributed(session), 10)
        session.save(str(tmp_path / "rows"))
        former = session.core.identity
    assert former is not None

    def names() -> list[str]:
        # The state loses what is forgotten with the next change of it, here another job.
        with sr.connect(scene.address, "nights", job="other", staleness=None):
            pass
        return [name for _, name in json.loads((tmp_path / "state.json").read_text())["job_names"]]

    wait_until(lambda: "nights/nightly" not in names(), "the job to be forgotten")
    with sr.connect(scene.address, "nights", job="nightly", staleness=staleness) as session:
        assert session.core.identity is not None
        assert session.core.identity.worker_id > former.worker_id
        model = distributed(session)
        steps_of(session, model, 3)
        late_frames_change_nothing(scene.address, former, knows_what_was_taken=True)
        # The shard that comes back has the rows of a checkpoint that knows the former job's clock.
        scene.shards[1].popen.kill()
        scene.shards[1].end()
        scene.shards[1] = scene.shard(1)
        wait_until(lambda: status_of(scene.address).shards[1].restores == 1, "the shard to come back")
        wait_until(scene.is_ready, "the cluster to be ready")
        steps_of(session, model, 1)  # behind what the shard that came back lacks and gets again
        late_frames_change_nothing(scene.address, former, knows_what_was_taken=False)
    np.testing.assert_array_equal(rows_of(scene.address), np.full((ROWS, DIM), -14.0, np.float32))
