"""With bounded or no staleness a shard that is killed comes back alone, and the loss is counted to the commit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sparserow as sr
from long_form import FULL
from restart_scene import Scene, status_of
from sparserow.proto import control_pb2 as pb
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import FailedPrecondition, InvalidArgument, Unavailable
from sparserow.worker.data import write_click_log
from sparserow_process import wait_until

pytestmark = pytest.mark.started

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"
ROWS, DIM = 400, 4


class AllRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, DIM)


def step(session, model) -> None:
    """Takes one from each row."""
    model.rows(torch.arange(ROWS)).sum().backward()
    session.step()


def shards_of(address: str):
    with ControlClient(address) as control:
        return control.status().shards


def kill_shard(cluster, index: int) -> None:
    before = shards_of(cluster.address)[index]
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: shards_of(cluster.address)[index].pid != before.pid, "another process of the shard")


def saved(url) -> int:
    return len(files.list_names(Folder(str(url))))


def steps_by_row(session, model) -> np.ndarray:
    """(ROWS) how many steps each row has had."""
    session.flush()
    rows = session.table("rows").pull(np.arange(ROWS, dtype=np.uint64))
    assert (rows == rows[:, :1]).all()
    return -rows[:, 0].astype(int)


@pytest.mark.parametrize("staleness", [None, 2])
@pytest.mark.parametrize("holds_all", [True, False])
def test_what_is_held_is_sent_again_and_the_rest_is_counted(tmp_path, monkeypatch, staleness, holds_all):
    if not holds_all:
        monkeypatch.setattr("sparserow.worker.api.connect.REPLAY_BYTES", 1)  # then the newest commit alone
    with (
        sr.local_cluster(shards=2, slot_count=64, worker_lease=30.0) as cluster,
        sr.connect(cluster.address, "held", staleness=staleness) as session,
    ):
        model = session.distribute(AllRows(), optimizer=sr.optim.SGD(lr=1.0), min_rows=100,
                              tables={"*": sr.Table(init=sr.Constant(0.0))})  # fmt: skip
        for _ in range(5):
            step(session, model)
        session.flush()
        session.keep_rows(str(tmp_path), every_sec=3600)
        wait_until(lambda: saved(tmp_path) == 1, "rows that are saved")
        for _ in range(6):
            step(session, model)
        kill_shard(cluster, 1)
        for _ in range(3):
            step(session, model)
        counts = steps_by_row(session, model)
        status = shards_of(cluster.address)
        lost = 0 if holds_all else 5
        assert sorted(set(counts)) == ([14] if holds_all else [14 - lost, 14])
        assert [shard.restores for shard in status] == [0, 1]
        assert [shard.commits_lost for shard in status] == [0, lost]
        # It ends again: the saves of before are not those of its lineage, and yet it has them.
        kill_shard(cluster, 1)
        step(session, model)
        again = steps_by_row(session, model)
        assert set(again[counts == 14 - lost]) <= {15 - lost, 15, 7}
        assert cluster.check() is None


@pytest.mark.parametrize("holds_all", [True, False])
def test_writes_by_key_are_sent_again_and_the_rest_is_counted(tmp_path, monkeypatch, holds_all):
    if not holds_all:
        monkeypatch.setattr("sparserow.worker.api.connect.REPLAY_BYTES", 1)  # then the newest write alone
    with (
        sr.local_cluster(shards=1, slot_count=64) as cluster,
        sr.connect(cluster.address, "by-key", staleness=None) as session,
    ):
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
        keys, ones = np.arange(4, dtype=np.uint64), np.ones((4, DIM), np.float32)
        table.push(keys, ones)
        session.save(str(tmp_path))
        table.push(keys, ones)
        table.assign(keys[:2], 5 * ones[:2])
        table.delete(keys[1:3])
        table.push(keys[3:], ones[3:])
        table.assign(keys[2:3], 9 * ones[:1])
        kill_shard(cluster, 0)
        expected = [5, 0, 9, -3] if holds_all else [-1, -1, 9, -1]
        assert table.pull(keys)[:, 0].tolist() == expected
        assert shards_of(cluster.address)[0].commits_lost == (0 if holds_all else 4)


def test_a_shard_that_ends_again_at_once_counts_every_lost_push_once(tmp_path, monkeypatch):
    monkeypatch.setattr("sparserow.worker.api.connect.REPLAY_BYTES", 1)  # the newest write alone
    with (
        sr.local_cluster(shards=2, slot_count=64) as cluster,
        sr.connect(cluster.address, "counts", staleness=None) as session,
    ):
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
        keys = np.arange(16, dtype=np.uint64)
        ones = np.ones((len(keys), DIM), np.float32)
        table.push(keys, -ones)
        session.save(str(tmp_path))
        for _ in range(100):
            table.push(keys, -ones)
        kill_shard(cluster, 1)
        kill_shard(cluster, 1)  # before it had its rows again
        table.push(keys, -ones)
        kill_shard(cluster, 1)  # after it was told what is lost
        table.push(keys, -ones)
        present = table.pull(keys)[:, 0]
        lost = 103 - int(present.min())
        assert set(present.tolist()) == {103.0, 103.0 - lost}
        assert lost >= 100
        # Each worker that comes and goes has the shards told of the job once more.
        for rank in range(3):
            with sr.connect(cluster.address, "counts", staleness=None, rank=1 + rank, world_size=2 + rank):
                pass
        assert [shard.commits_lost for shard in shards_of(cluster.address)] == [0, lost]


def test_the_next_save_has_what_came_back(tmp_path):
    with (
        sr.local_cluster(shards=2, slot_count=64) as cluster,
        sr.connect(cluster.address, "again", staleness=None) as session,
    ):
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        keys = np.arange(ROWS, dtype=np.uint64)
        table.push(keys, np.ones((ROWS, DIM), np.float32))
        session.save(str(tmp_path), full_every=5)
        table.push(keys, np.ones((ROWS, DIM), np.float32))
        kill_shard(cluster, 0)
        np.testing.assert_array_equal(table.pull(keys), np.full((ROWS, DIM), -2.0))
        saved_again = session.save(str(tmp_path), full_every=5)
        manifest = files.read_manifest(Folder(str(tmp_path)), saved_again.name)
        assert (manifest.base, manifest.rows) == ("", ROWS), "what came back is of another lineage: all rows are saved"
        table.push(keys[:7], np.ones((7, DIM), np.float32))
        kill_shard(cluster, 1)
        expected = np.where(np.arange(ROWS)[:, None] < 7, -3.0, -2.0) * np.ones((1, DIM))
        np.testing.assert_array_equal(table.pull(keys), expected)


def test_a_shard_that_cannot_come_back_ends_the_cluster(tmp_path):
    url = tmp_path / "ckpt"

    def has_ended(cluster) -> bool:
        try:
            cluster.check()
        except Unavailable as error:
            reasons.append(str(error))
            return True
        return False

    reasons: list[str] = []
    with pytest.raises(Unavailable), sr.local_cluster(shards=2, slot_count=64) as cluster:  # noqa: PT012
        with sr.connect(cluster.address, "gone", staleness=None) as session:
            session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
            session.save(str(url))
        (url / "save-000001" / "slots.0.safetensors").unlink()
        os.kill(cluster.shard_pids[0], signal.SIGKILL)
        wait_until(lambda: has_ended(cluster), "the end of the cluster")
    assert "shard 0 cannot be restored: " in reasons[0]
    assert "slots." in reasons[0]
    assert "is missing; the checkpoint is damaged; the cluster was stopped" in reasons[0]

    with (  # noqa: PT012
        pytest.raises(Unavailable),
        sr.local_cluster(shards=2, slot_count=64) as cluster,
        sr.connect(cluster.address, "sync") as session,
    ):
        session.save(str(tmp_path / "sync"))
        os.kill(cluster.shard_pids[1], signal.SIGKILL)
        wait_until(lambda: has_ended(cluster), "the end of the cluster")
    assert "(job sync/sync is synchronous: its workers and all shards have to be restored together)" in reasons[1]


def test_status_says_why_a_shard_does_not_come_back_and_a_restore_brings_it(launcher, tmp_path):
    scene, keys = Scene(launcher, tmp_path), np.arange(ROWS, dtype=np.uint64)
    with sr.connect(scene.address, staleness=None) as session:
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        table.assign(keys, np.ones((ROWS, DIM), np.float32))
        session.save(str(tmp_path / "ckpt"))
        table.assign(keys, np.zeros((ROWS, DIM), np.float32))
        session.save(str(tmp_path / "ckpt"))
    (tmp_path / "ckpt" / "save-000002" / "slots.0.safetensors").unlink()
    scene.shards[0].popen.kill()
    scene.shards[0].end()
    wait_until(lambda: status_of(scene.address).shards[0].state == pb.LOST, "the end of its lease")
    scene.shard(0)
    wait_until(lambda: "slots.0.safetensors: the file is missing" in status_of(scene.address).problem, "the reason")
    assert "shard 0: its process is not serving yet; shard 0 cannot be restored: " in status_of(scene.address).problem
    assert not status_of(scene.address).ready
    with ControlClient(scene.address) as control:
        request = pb.RestoreRequest(url=str(tmp_path / "ckpt"), name="save-000001")
        assert control.restore(request, None, deadline_sec=120).rows == ROWS
    status = status_of(scene.address)
    assert (status.ready, status.problem) == (True, "")
    with sr.connect(scene.address, staleness=None) as session:
        np.testing.assert_array_equal(session.table("rows").pull(keys), np.ones((ROWS, DIM), np.float32))


def test_bad_input(tmp_path):
    with sr.local_cluster(shards=1, slot_count=64) as cluster:
        with (
            sr.connect(cluster.address, "sync") as session,
            pytest.raises(FailedPrecondition, match="has staleness 0, where all shards are restored together"),
        ):
            session.keep_rows(str(tmp_path))
        with sr.connect(cluster.address, "bad", staleness=None) as session:
            with pytest.raises(InvalidArgument, match=r"every_sec: 0.0 is not allowed; allowed: \(0, 86400\]"):
                session.keep_rows(str(tmp_path), every_sec=0)
            with pytest.raises(InvalidArgument, match="nosuch://x"):
                session.keep_rows("nosuch://x")


@pytest.mark.parametrize("mode", [("2", "ddp"), *([("null", "ps")] if FULL else [])])
def test_a_job_goes_on_when_a_shard_is_killed(launcher, tmp_path, mode):
    staleness, dense = mode
    steps = 120
    log = write_click_log(tmp_path, rows=2 * steps * 64, test_rows=1500, seed=3)
    url, result = tmp_path / "ckpt", tmp_path / "result.json"
    settings = [
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.args.rows={'*': 3000}",
        "model.min_rows=1",
        "train.batch_size=64",
        "train.workers=2",
        "train.threads=1",
        f"train.staleness={staleness}",
        f"train.dense={dense}",
        "cluster.slot_count=256",
        "cluster.worker_lease=30s",
        f"train.checkpoint={{url: '{url}', every_steps: 100000, delta_every: 200ms}}",
    ]
    assigned = [part for setting in settings for part in ("--set", setting)]
    run = launcher.start("train", str(JOBS / "demo.yaml"), *assigned, "--json", str(result))
    wait_until(lambda: run.popen.poll() is not None or saved(url / "rows") >= 2, "two saves of the rows", 600)
    workers = {process.pid for process in launcher.by_role()["worker"]}
    assert workers, run.err
    launcher.by_role()["shard"][0].send_signal(signal.SIGKILL)
    seen: set[int] = set()

    def is_over() -> bool:
        seen.update(process.pid for process in launcher.by_role()["worker"])
        return run.popen.poll() is not None

    wait_until(is_over, "the end of the job", 600)
    assert run.popen.returncode == 0, run.err
    assert seen <= workers, "no worker was started anew"
    figures = json.loads(result.read_text())
    assert figures["shard_restores"] == 1
    assert figures["commits_lost"] <= 2 * steps
    assert figures["history"][0]["samples"] == 2 * steps * 64
    assert figures["test_auc"] > 0.6
    assert "is restarted with the rows of the newest checkpoint" in run.err
    assert "is back after" in run.err
    assert "shards that came back" in run.out
    wait_until(lambda: not launcher.living(), "no process is left")
