"""A restore that fails: nothing is emptied where the checkpoint is damaged, and what is not whole is never "ready"."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from gated_store import GatedStore
from restart_scene import Scene, status_of
from sparserow.proto import control_pb2 as pb
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
)
from sparserow_process import Launcher, wait_until

pytestmark = pytest.mark.started

DIM = 16
KEYS = np.arange(20_000, dtype=np.uint64)
MANY = np.arange(400_000, dtype=np.uint64)  # a restore of these takes long enough to be met
ONES = np.ones((len(KEYS), DIM), np.float32)


def filled(session: sr.Session, keys: np.ndarray = KEYS):
    """A table with a row for each key, all of minus one."""
    table = session.create_table("rows", dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1), init=sr.Constant(0.0))
    for part in np.array_split(keys, 1 + len(keys) // 100_000):
        table.assign(part, np.full((len(part), DIM), -1, np.float32))
    return table


def flip_a_bit(url: Path, name: str, shard: int = 1) -> Path:
    """In rows of one shard; the file."""
    part = next((url / name).glob(f"rows.{shard}.*safetensors"))
    data = bytearray(part.read_bytes())
    data[-3] ^= 1
    part.write_bytes(data)
    return part


def restore(address: str, url: Path | str, *, deadline_sec: float = 120, **fields) -> pb.RestoreReply:
    """As the command does."""
    with ControlClient(address) as control:
        return control.restore(pb.RestoreRequest(url=str(url), **fields), None, deadline_sec=deadline_sec)


def save(address: str, url: Path, **fields) -> None:
    """As the command does."""
    with ControlClient(address) as control:
        name = control.begin_save(str(url), None, deadline_sec=60).name
        control.enter_save(pb.EnterSaveRequest(url=str(url), name=name, **fields), None, deadline_sec=60)
        while (reply := control.get_save(str(url), name, wait_sec=5)).phase != pb.SAVED:
            assert reply.phase != pb.FAILED, reply


@pytest.mark.parametrize("asks", ["the command", "a job"])
def test_rows_stay_when_a_file_is_damaged(tmp_path: Path, asks: str) -> None:
    url = tmp_path / "ckpt"
    with sr.local_cluster(shards=2, slot_count=64) as cluster:
        with sr.connect(cluster.address, "stay", staleness=None) as session:
            table = filled(session)
            session.save(str(url))
            table.push(KEYS, ONES)
            expected = table.pull(KEYS)
            part = flip_a_bit(url, "save-000001")
            if asks == "a job":
                with pytest.raises(DataLoss, match=f"{part}: is damaged: its checksum does not match"):
                    session.restore(str(url))
                np.testing.assert_array_equal(table.pull(KEYS), expected)
                table.push(KEYS, ONES)
                expected = table.pull(KEYS)
        if asks == "the command":
            with pytest.raises(DataLoss, match=f"{part}: is damaged: its checksum does not match"):
                restore(cluster.address, url)
        assert (status_of(cluster.address).ready, status_of(cluster.address).damage) == (True, "")
        with sr.connect(cluster.address, "stay", staleness=None) as session:
            np.testing.assert_array_equal(session.table("rows").pull(KEYS), expected)


def test_a_plan_that_fails_leaves_no_table(tmp_path: Path) -> None:
    """The damage is found when the tables of the checkpoint are in the registry already."""
    url = tmp_path / "ckpt"
    with sr.local_cluster(shards=2, slot_count=64) as cluster, sr.connect(cluster.address, "a", staleness=None) as a:
        filled(a)
        a.save(str(url))
        part = flip_a_bit(url, "save-000001")
        with pytest.raises(DataLoss, match=str(part)):
            a.restore(str(url))
        assert [table.full_name for table in a.core.catalog.list_tables("a")] == ["a/rows"]


def refusals(session: sr.Session, url: Path) -> list[str]:
    """What each way to the rows of a damaged cluster says."""
    table, found = session.table("rows"), []
    for call in (
        lambda: table.pull(KEYS[:10]),
        lambda: table.push(KEYS[:10], ONES[:10]),
        lambda: table.assign(KEYS[:10], ONES[:10]),
        lambda: table.delete(KEYS[:10]),
        lambda: list(table.scan()) if hasattr(table, "scan") else table.pull(KEYS),
        lambda: session.save(str(url)),
        lambda: session.publish("model", root=str(url.parent / "models")),
    ):
        with pytest.raises(FailedPrecondition) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_a_damaged_cluster_says_so_until_a_restore_succeeds(tmp_path: Path) -> None:
    url = tmp_path / "ckpt"
    with sr.local_cluster(shards=2, slot_count=64) as cluster, sr.connect(cluster.address, staleness=None) as session:
        table = filled(session)
        session.save(str(url))
        table.push(KEYS, ONES)
        session.save(str(url))
    part = flip_a_bit(url, "save-000002")
    with sr.local_cluster(shards=2, slot_count=64) as cluster:
        with pytest.raises(DataLoss, match=str(part)):
            restore(cluster.address, url)
        status = status_of(cluster.address)
        assert not status.ready
        reason = f"the cluster is damaged, because the restore of {url}/save-000002 failed ({part}: is damaged"
        assert status.problem == status.damage
        assert status.damage.startswith(reason)
        with sr.connect(cluster.address, staleness=None) as session:  # jobs may join
            other = session.create_table("other", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
            other.push(KEYS[:10], ONES[:10])  # a table that no restore was of
            for refusal in refusals(session, url):
                assert reason in refusal
            with ControlClient(cluster.address) as control, pytest.raises(FailedPrecondition, match="is damaged"):
                control.begin_save(str(url), None, deadline_sec=60)
            assert files.list_names(Folder(str(url))) == ["save-000001", "save-000002"], "nothing was pruned"
            with pytest.raises(DataLoss, match=str(part)):
                session.restore(str(url))
            assert status_of(cluster.address).damage.startswith(reason)
            assert session.restore(str(url), name="save-000001").rows == len(KEYS)
            status = status_of(cluster.address)
            assert (status.ready, status.problem, status.damage) == (True, "", "")
            np.testing.assert_array_equal(session.table("rows").pull(KEYS), -ONES)
            session.table("rows").push(KEYS, ONES)
            session.save(str(url))


def test_a_table_that_is_dropped_is_damaged_no_more(tmp_path: Path) -> None:
    url = tmp_path / "ckpt"
    with sr.local_cluster(shards=2, slot_count=64) as cluster, sr.connect(cluster.address, staleness=None) as session:
        filled(session)
        session.save(str(url))
    flip_a_bit(url, "save-000001")
    with sr.local_cluster(shards=2, slot_count=64) as cluster, sr.connect(cluster.address, staleness=None) as session:
        mine = session.create_table("mine", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        mine.push(KEYS, ONES)
        expected = mine.pull(KEYS)
        with pytest.raises(DataLoss):
            session.restore(str(url), tables=["rows"])
        np.testing.assert_array_equal(mine.pull(KEYS), expected)
        with pytest.raises(FailedPrecondition, match="the cluster is damaged"):
            session.save(str(url))
        with ControlClient(cluster.address) as control:
            control.drop_table("default", "rows")
        assert status_of(cluster.address).ready
        session.save(str(url))


def test_a_restore_that_has_no_room_leaves_a_damaged_cluster(tmp_path: Path) -> None:
    url = tmp_path / "ckpt"
    with sr.local_cluster(shards=1, slot_count=64) as cluster, sr.connect(cluster.address, staleness=None) as session:
        table = filled(session, KEYS[:1000])
        session.save(str(url))
        table.assign(MANY, np.zeros((len(MANY), DIM), np.float32))
        session.save(str(url))
    with (
        sr.local_cluster(shards=1, slot_count=64, memory_budget="24MiB") as cluster,
        sr.connect(cluster.address, staleness=None) as session,
    ):
        session.restore(str(url), name="save-000001")
        with pytest.raises(ResourceExhausted):
            session.restore(str(url))
        assert not status_of(cluster.address).ready
        with pytest.raises(FailedPrecondition, match=r"because the restore of .*save-000002 failed"):
            session.table("rows").pull(KEYS)
        session.restore(str(url), name="save-000001")
        assert status_of(cluster.address).ready
        np.testing.assert_array_equal(session.table("rows").pull(KEYS[:1000]), -ONES[:1000])


def test_what_was_read_whole_last_is_not_pruned(launcher: Launcher, tmp_path: Path) -> None:
    url = tmp_path / "ckpt"
    with sr.local_cluster(shards=1, slot_count=64) as cluster:
        with sr.connect(cluster.address, staleness=None) as session:
            filled(session)
            for _ in range(2):
                session.save(str(url))
        restore(cluster.address, url, name="save-000001")
        for expected in (["save-000001", "save-000003"], ["save-000001", "save-000004"]):
            save(cluster.address, url, keep=1)
            assert files.list_names(Folder(str(url))) == expected
        run = launcher.start("checkpoint", "verify", str(url))
        assert run.popen.wait(120) == 0, run.err
        save(cluster.address, url, keep=1)
        assert files.list_names(Folder(str(url))) == ["save-000004", "save-000005"]


@contextmanager
def restoring(address: str, source: str, **fields) -> Iterator[Future[pb.RestoreReply]]:
    """A restore for the duration of the block, asked by a thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(restore, address, source, **fields)


ROW_FILES = r"/rows\..*safetensors"


def hold_loads(store: GatedStore, url: Path) -> None:
    """Holds the files of rows back from a restore in place once it has verified all of them."""
    store.hold(ROW_FILES, after=len(list(url.glob("save-*/rows*"))))


def minus_ones(session: sr.Session) -> None:
    """Asserts that every row is as it was saved."""
    np.testing.assert_array_equal(session.table("rows").pull(KEYS), -ONES)


def test_a_restore_goes_on_when_its_caller_is_gone(tmp_path: Path) -> None:
    url = tmp_path / "ckpt"
    with GatedStore(url) as store, sr.local_cluster(shards=2, slot_count=64) as cluster:
        with sr.connect(cluster.address, staleness=None) as session:
            table = filled(session)
            session.save(str(url))
            table.push(KEYS, ONES)
        store.hold(ROW_FILES)
        with pytest.raises(DeadlineExceeded):
            restore(cluster.address, store.url, deadline_sec=1.0)
        store.until_met()
        with restoring(cluster.address, store.url) as same:
            store.release()
            assert same.result(120).rows == len(KEYS)
        with sr.connect(cluster.address, staleness=None) as session:
            minus_ones(session)


def kill_shard(cluster: sr.LocalCluster, index: int) -> None:
    """Ends its process, and returns when another one has taken its place."""
    before = status_of(cluster.address).shards[index]
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: status_of(cluster.address).shards[index].pid != before.pid, "another process of the shard")


@pytest.mark.parametrize("staleness", [None, 0])
@pytest.mark.parametrize("files_of", [r"/rows\.0\.", r"/rows\.1\."])
def test_a_shard_that_is_killed_meanwhile_loads_again(tmp_path: Path, staleness: int | None, files_of: str) -> None:
    """The killed one is in the midst of its load, or has its rows already while the other one loads."""
    url = tmp_path / "ckpt"
    with sr.local_cluster(shards=2, slot_count=64) as first, sr.connect(first.address) as session:
        filled(session)
        session.save(str(url))
    with GatedStore(url) as store, sr.local_cluster(shards=2, slot_count=64) as cluster:
        store.hold(files_of)
        with restoring(cluster.address, store.url) as reply:
            store.until_met()
            status = status_of(cluster.address)
            assert not status.ready
            assert status.problem == status.damage == f"rows are being restored from {store.url}/save-000001"
            with pytest.raises(Unavailable, match=r"is loading rows|are being restored"):  # noqa: SIM117
                with sr.connect(cluster.address, job="reader", staleness=None, deadline_sec=1.0) as reader:
                    reader.table("rows").pull(KEYS)
            kill_shard(cluster, 1)
            store.release()
            assert reply.result(120).rows == len(KEYS)
        assert status_of(cluster.address).ready
        with sr.connect(cluster.address, staleness=staleness) as session:
            minus_ones(session)
        assert cluster.check() is None


@pytest.mark.parametrize("staleness", [None, 0])
def test_a_shard_that_is_killed_while_a_job_goes_back_loads_again(tmp_path: Path, staleness: int | None) -> None:
    """What the worker holds of its commits is sent again to the new process, which must not apply it."""
    url = tmp_path / "ckpt"
    with (
        GatedStore(url) as store,
        sr.local_cluster(shards=2, slot_count=64, worker_lease=60.0) as cluster,
        sr.connect(cluster.address, staleness=staleness) as session,
    ):
        table = filled(session)
        session.save(str(url))
        for _ in range(3):
            table.push(KEYS, ONES)
        hold_loads(store, url)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(session.restore, store.url)
            store.until_met()
            kill_shard(cluster, 1)
            store.release()
            assert reply.result(120).rows == len(KEYS)
        minus_ones(session)
        table.push(KEYS, ONES)
        assert (table.pull(KEYS) < -1).all()


def test_a_shard_of_a_damaged_cluster_is_let_in_and_restored(tmp_path: Path) -> None:
    url = tmp_path / "ckpt"
    with sr.local_cluster(shards=2, slot_count=64) as cluster, sr.connect(cluster.address, staleness=None) as session:
        filled(session)
        session.save(str(url))
        session.save(str(url))
    flip_a_bit(url, "save-000002")
    with sr.local_cluster(shards=2, slot_count=64) as cluster:
        with pytest.raises(DataLoss):
            restore(cluster.address, url)
        before = status_of(cluster.address).shards[0]
        os.kill(before.pid, signal.SIGKILL)
        wait_until(lambda: status_of(cluster.address).shards[0].pid != before.pid, "another process of the shard")
        wait_until(lambda: all(shard.state == pb.SERVING for shard in status_of(cluster.address).shards), "all shards")
        assert "is damaged" in status_of(cluster.address).problem
        with sr.connect(cluster.address, staleness=None) as session:
            with pytest.raises(FailedPrecondition, match="is damaged"):
                session.table("rows").pull(KEYS)
            session.restore(str(url), name="save-000001")
            np.testing.assert_array_equal(session.table("rows").pull(KEYS), -ONES)


def test_a_restore_begins_anew_with_the_coordinator(launcher: Launcher, tmp_path: Path) -> None:
    url = tmp_path / "ckpt"
    url.mkdir()
    with GatedStore(url) as store:
        launcher.environment |= store.environment
        scene = Scene(launcher, tmp_path)
        with sr.connect(scene.address, staleness=None) as session:
            table = filled(session)
            session.save(str(url))
            table.push(KEYS, ONES)
        wait_until(lambda: not status_of(scene.address).jobs, "the end of the job")
        hold_loads(store, url)
        with ThreadPoolExecutor(1) as pool:
            gone = pool.submit(restore, scene.address, store.url)
            store.until_met()
            scene.kill()
            with pytest.raises(Unavailable):
                gone.result(120)
        scene.start()
        assert f"rows are being restored from {store.url}" in status_of(scene.address).damage
        store.release()
        wait_until(scene.is_ready, "the restore, begun anew")
        with sr.connect(scene.address, staleness=None) as session:
            minus_ones(session)


def test_damage_outlives_the_coordinator(launcher: Launcher, tmp_path: Path) -> None:
    url = tmp_path / "ckpt"
    with sr.local_cluster(shards=2, slot_count=64) as first, sr.connect(first.address) as session:
        filled(session)
        for _ in range(2):
            session.save(str(url))
    part = flip_a_bit(url, "save-000002")
    scene = Scene(launcher, tmp_path)
    with pytest.raises(DataLoss, match=str(part)):
        restore(scene.address, url)
    damage = status_of(scene.address).damage
    assert "is damaged" in damage
    for restarts in range(2):
        scene.kill()
        scene.start()
        wait_until(lambda: all(it.state == pb.SERVING for it in status_of(scene.address).shards), "the shards")
        assert status_of(scene.address).damage == damage
        if restarts:  # a process that comes then has no rows either
            scene.shards[0].popen.kill()
            scene.shards[0].end()
            wait_until(lambda: status_of(scene.address).shards[0].state == pb.LOST, "the end of its lease")
            scene.shard(0)
            wait_until(lambda: all(it.state == pb.SERVING for it in status_of(scene.address).shards), "the shards")
        with (
            sr.connect(scene.address, staleness=None) as session,
            pytest.raises(FailedPrecondition, match="is damaged"),
        ):
            session.table("rows").pull(KEYS)
    restore(scene.address, url, name="save-000001")
    with sr.connect(scene.address, staleness=None) as session:
        minus_ones(session)


def is_reached(session: sr.Session) -> bool:
    """Whether the session reaches its coordinator again; others may do so before it."""
    try:
        session.core.catalog.list_tables(session.namespace)
    except Unavailable:
        return False
    return True


def test_a_job_that_went_back_when_the_coordinator_ended_asks_again(launcher: Launcher, tmp_path: Path) -> None:
    url = tmp_path / "ckpt"
    url.mkdir()
    with GatedStore(url) as store:
        launcher.environment |= store.environment
        scene = Scene(launcher, tmp_path)
        with sr.connect(scene.address, staleness=None, deadline_sec=60.0) as session:
            table = filled(session)
            session.save(str(url))
            table.push(KEYS, ONES)
            hold_loads(store, url)
            with ThreadPoolExecutor(1) as pool:
                gone = pool.submit(session.restore, store.url)
                store.until_met()
                scene.kill()
                with pytest.raises(Unavailable):
                    gone.result(120)
            store.release()
            scene.start()
            words = "the coordinator ended before all rows were loaded"
            wait_until(lambda: words in status_of(scene.address).damage, "the damage")
            wait_until(lambda: all(it.state == pb.SERVING for it in status_of(scene.address).shards), "the shards")
            wait_until(lambda: is_reached(session), "the connection of the session")
            assert session.restore(store.url).rows == len(KEYS)
            minus_ones(session)
            table.push(KEYS, ONES)
