"""A table that training drops, or makes anew with another schema, under a version that follows it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from sparserow.proto.published.manifest import ModelManifest
from sparserow.proto.published.registry import ModelRegistry
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.follow_options import FollowOptions
from sparserow.serving.live_sync import Follower
from sparserow.serving.loaded_version import LoadedVersion, load_version
from sparserow_process import wait_until

KEYS = np.arange(64, dtype=np.uint64)


def write(cluster: sr.LocalCluster, dim: int) -> None:
    with sr.connect(cluster.address, "ads", job="writes", staleness=None) as session:
        table = session.create_table("user", dim=dim, optimizer=sr.optim.SGD(lr=0.5))
        table.assign(KEYS, np.ones((len(KEYS), dim), np.float32))


def rows_of(version: LoadedVersion, table: str) -> np.ndarray:
    return version.store.pull(version.tables[table].schema.id, KEYS)[0]


@contextlib.contextmanager
def followed(session: sr.Session, cluster: sr.LocalCluster, root: Path) -> Iterator[tuple[LoadedVersion, Follower]]:
    """Publishes the tables, and follows them once around."""
    session.publish("ctr", root=str(root))
    registry, place = ModelRegistry(str(root)), ShardAssignment()
    version = load_version(registry, registry.manifest("ctr", 1), place)
    follower = Follower(version, place.owned(64), FollowOptions(cluster.address, "test", retry_sec=0.01))
    try:
        wait_until(lambda: follower.is_complete, "the first round")
        yield version, follower
    finally:
        follower.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_table_with_another_dim_is_told_once_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restarts: bool
) -> None:
    """Also for a process that is started, or loads the version, after the table was made anew."""
    told = "table ads/user has dim 8 and schema version 1 in training; its rows stay as they were; publish it again"
    with sr.local_cluster(shards=2, slot_count=64) as cluster:
        write(cluster, 4)
        with sr.connect(cluster.address, "ads", staleness=None) as session:
            other = session.create_table("item", dim=4, optimizer=sr.optim.SGD(lr=0.5))
            other.assign(KEYS, np.ones((len(KEYS), 4), np.float32))
            with (
                caplog.at_level(logging.WARNING),
                followed(session, cluster, tmp_path) as (version, follower),
                contextlib.ExitStack() as ends,
            ):
                session.drop_table("user")
                write(cluster, 8)
                if restarts:
                    follower.close()
                    caplog.clear()  # because the first follower may have seen the new table, and each logs it once
                    version = load_version(ModelRegistry(str(tmp_path)), version_of(tmp_path), ShardAssignment())
                    options = FollowOptions(cluster.address, "test", retry_sec=0.01)
                    follower = Follower(version, ShardAssignment().owned(64), options)
                    ends.callback(follower.close)
                other.assign(KEYS, np.full((len(KEYS), 4), 5, np.float32))
                wait_until(lambda: rows_of(version, "item").min() == 5, "the rows of the other table")
                wait_until(lambda: follower.problem == told, f"{told!r}")
                other.delete(KEYS[:3])
                wait_until(lambda: rows_of(version, "item").min() == 0, "deleted rows of the other table")
                np.testing.assert_array_equal(rows_of(version, "user"), np.ones((len(KEYS), 4)))
                assert follower.stats().reopened == 0
                lines = [record.getMessage() for record in caplog.records]
                assert lines.count(f"live sync of ctr: {told}") == 1, lines
                # Where the table is as it was again, it follows again.
                session.drop_table("user")
                write(cluster, 4)
                wait_until(lambda: follower.problem == "", "that all follow")


def version_of(root: Path) -> ModelManifest:
    return ModelRegistry(str(root)).manifest("ctr", 1)


def test_a_version_without_a_table_that_can_follow_is_refused(tmp_path: Path) -> None:
    with sr.local_cluster(shards=1, slot_count=64) as cluster:
        write(cluster, 4)
        with sr.connect(cluster.address, "ads", staleness=None) as session:
            session.publish("ctr", root=str(tmp_path))
            session.drop_table("user")
            version = load_version(ModelRegistry(str(tmp_path)), version_of(tmp_path), ShardAssignment())
            options = FollowOptions(cluster.address, "test")
            with pytest.raises(sr.errors.FailedPrecondition, match="table ads/user is not there any more"):
                Follower(version, ShardAssignment().owned(64), options)
            write(cluster, 8)
            with pytest.raises(sr.errors.FailedPrecondition, match=r"table ads/user has dim 8 .* publish it again"):
                Follower(version, ShardAssignment().owned(64), options)


def test_rows_of_a_table_that_training_drops_stay_and_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sr.local_cluster(shards=2, slot_count=64) as cluster:
        write(cluster, 4)
        with sr.connect(cluster.address, "ads", staleness=None) as session:
            other = session.create_table("item", dim=4, optimizer=sr.optim.SGD(lr=0.5))
            other.assign(KEYS, np.ones((len(KEYS), 4), np.float32))
            with followed(session, cluster, tmp_path) as (version, follower), caplog.at_level(logging.WARNING):
                session.drop_table("user")
                told = "table ads/user was dropped in training; its rows stay as they were"
                wait_until(lambda: follower.problem == told, f"{told!r}")
                other.assign(KEYS, np.full((len(KEYS), 4), 5, np.float32))
                wait_until(lambda: rows_of(version, "item").min() == 5, "the rows of the table that is left")
                assert follower.problem == told
                assert [record.getMessage() for record in caplog.records] == [f"live sync of ctr: {told}"]
                np.testing.assert_array_equal(rows_of(version, "user"), np.ones((len(KEYS), 4)))
                assert follower.stats().erased == 0
