"""A restore of one job leaves the rows, the jobs and the followers of other namespaces alone, also when a shard dies
afterwards; a cluster without rows is restored whole.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from restart_scene import shard_returns, status_of
from sparserow.proto.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from sparserow.proto.published.registry import ModelRegistry
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.follow_options import FollowOptions
from sparserow.serving.live_sync import Follower
from sparserow.serving.loaded_version import load_version
from sparserow_process import wait_until

pytestmark = pytest.mark.started

KEYS = np.arange(1, 200, dtype=np.uint64)
DIM = 4


def connected(cluster, namespace: str, **options):
    return sr.connect(cluster.address, namespace=namespace, staleness=1, namespace_policy="continue", **options)


def table(session, name: str = "t"):
    return session.create_table(name, dim=DIM, optimizer=sr.optim.SGD(lr=1.0))


def fill(session, value: float, name: str = "t") -> None:
    table(session, name).assign(KEYS, np.full((len(KEYS), DIM), value, np.float32))
    session.flush()


def values(session, name: str = "t") -> list[float]:
    return np.unique(table(session, name).pull(KEYS)).tolist()


@pytest.fixture
def scene():
    """A cluster with the namespaces `daily` and `own`, whose tables have ones."""
    with (
        sr.local_cluster(shards=2, slot_count=64, worker_lease=30.0) as cluster,
        connected(cluster, "daily") as daily,
        connected(cluster, "own") as own,
    ):
        fill(daily, 1)
        fill(own, 1)
        yield cluster, daily, own


def test_a_restore_of_one_namespace_is_of_nothing_else(scene, tmp_path: Path) -> None:
    cluster, daily, own = scene
    daily.save(str(tmp_path))
    fill(daily, 3)
    fill(daily, 7, "late")
    fill(own, 2)
    assert status_of(cluster.address).checkpoint.endswith("save-000001")
    restored = daily.restore(str(tmp_path))  # beside the other namespace's job
    assert restored.rows == len(KEYS)
    assert (values(daily), values(daily, "late")) == ([1], [0])
    assert values(own) == [2]
    own.table("t").push(KEYS, np.ones((len(KEYS), DIM), np.float32))
    own.flush()
    assert values(own) == [1], "the job goes on"
    assert status_of(cluster.address).checkpoint.endswith("save-000001")
    assert status_of(cluster.address).ready


@pytest.mark.parametrize("form", ["namespace", "tables", "renames", "twice", "saved after"])
def test_one_shard_returns_after_a_restore(scene, tmp_path: Path, form: str) -> None:
    cluster, daily, own = scene
    fill(daily, 5, "other")
    daily.save(str(tmp_path))
    fill(daily, 3)
    fill(daily, 6, "other")
    fill(own, 2)
    daily.save(str(tmp_path))
    fill(daily, 4)
    forms = {"tables": {"tables": ["t"]}, "renames": {"renames": {"t": "copy"}, "tables": ["t"]}}
    daily.restore(str(tmp_path), name="save-000001", **forms.get(form, {}))
    if form == "twice":
        daily.restore(str(tmp_path), name="save-000002")
    if form == "saved after":
        fill(own, 8)
        own.save(str(tmp_path))
    expected = {
        "namespace": ([1], [5]),
        "tables": ([1], [6]),
        "renames": ([4], [6]),
        "twice": ([3], [6]),
        "saved after": ([1], [5]),
    }[form]
    assert (values(daily), values(daily, "other")) == expected
    for index in range(2):
        shard_returns(cluster, index)
    if form == "renames":  # what was not restored goes back to the newest save
        assert values(daily, "copy") == [1]
        expected = ([3], [6])
    assert (values(daily), values(daily, "other")) == expected
    assert values(own) == ([8] if form == "saved after" else [2])
    fill(own, 9)
    own.save(str(tmp_path))
    own.restore(str(tmp_path))
    assert values(own) == [9]


def test_a_damaged_file_is_found_before_a_row_goes(scene, tmp_path: Path) -> None:
    cluster, daily, own = scene
    daily.save(str(tmp_path))
    fill(own, 2)
    for part in (tmp_path / "save-000001").glob("rows*"):
        data = bytearray(part.read_bytes())
        data[-100] ^= 1
        part.write_bytes(data)
    with pytest.raises(DataLoss):
        daily.restore(str(tmp_path))
    assert status_of(cluster.address).damage == ""
    assert (values(daily), values(own)) == ([1], [2])


def test_jobs_of_the_namespace_stand_still_and_no_others(scene, tmp_path: Path) -> None:
    cluster, daily, own = scene
    daily.save(str(tmp_path))
    with connected(cluster, "daily", job="second"):
        with pytest.raises(FailedPrecondition, match="jobs daily/second are running on namespace daily; stop them"):
            daily.restore(str(tmp_path))
        fill(own, 2)
        own.restore(str(tmp_path))
    assert (values(daily), values(own)) == ([1], [1])


def test_rows_of_others_are_refused_by_name(scene, tmp_path: Path) -> None:
    cluster, daily, own = scene
    daily.save(str(tmp_path))
    fill(own, 2)
    with pytest.raises(InvalidArgument, match="'own/t' is not allowed; allowed: tables of the namespace 'daily'"):
        daily.restore(str(tmp_path), tables=["own/t"])
    with pytest.raises(InvalidArgument, match="'own/t' is not allowed"):
        daily.restore(str(tmp_path), renames={"t": "own/t"})
    daily.restore(str(tmp_path), tables=["own/t"], renames={"own/t": "daily/warm"})
    assert (values(daily, "warm"), values(daily), values(own)) == ([1], [1], [2])
    with connected(cluster, "new") as new:
        fill(new, 3)
        with pytest.raises(NotFound, match="has no table of namespace 'new'; there are: daily/t, own/t"):
            new.restore(str(tmp_path))
        assert values(new) == [3]


def test_a_cluster_without_rows_is_restored_whole(scene, tmp_path: Path) -> None:
    _, daily, _ = scene
    daily.save(str(tmp_path))
    with sr.local_cluster(shards=1, slot_count=64) as fresh, ExitStack() as sessions:
        with connected(fresh, "daily") as restoring:
            assert restoring.restore(str(tmp_path)).rows == 2 * len(KEYS)
        for namespace in ("daily", "own"):
            assert values(sessions.enter_context(connected(fresh, namespace))) == [1]


def test_a_follower_of_another_namespace_goes_on_as_if_nothing_were(scene, tmp_path: Path) -> None:
    """No cursor is opened again and no slot is sent whole; the one of the restored namespace has its old rows."""
    cluster, daily, own = scene
    root = tmp_path / "models"
    with ExitStack() as ends:
        followers = {}
        for name, session in (("daily", daily), ("own", own)):
            session.publish(name, root=str(root))
            registry = ModelRegistry(str(root))
            version = load_version(registry, registry.manifest(name, 1), ShardAssignment())
            options = FollowOptions(cluster.address, f"test-{name}", retry_sec=0.01)
            follower = Follower(version, ShardAssignment().owned(64), options)
            ends.callback(follower.close)
            followers[name] = (follower, version)
        for follower, _ in followers.values():
            wait_until(lambda follower=follower: follower.is_complete, "the first round")

        def served(name: str) -> list[float]:
            version = followers[name][1]
            return np.unique(version.store.pull(version.tables["t"].schema.id, KEYS)[0]).tolist()

        daily.save(str(tmp_path / "saves"))
        fill(daily, 3)
        fill(own, 2)
        wait_until(lambda: (served("daily"), served("own")) == ([3], [2]), "what was trained")
        before = followers["own"][0].stats()
        daily.restore(str(tmp_path / "saves"))
        wait_until(lambda: served("daily") == [1], "the rows of the restored namespace")
        fill(own, 4)
        wait_until(lambda: served("own") == [4], "what the other namespace trained on")
        after = followers["own"][0].stats()
        assert (after.reopened, after.erased, after.unchanged) == (before.reopened, before.erased, before.unchanged)
        assert after.rows - before.rows == len(KEYS), "each row that changed came once"
        assert (followers["own"][0].problem, followers["daily"][0].problem) == ("", "")
