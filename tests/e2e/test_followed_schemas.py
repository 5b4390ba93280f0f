"""A table that training drops, or makes anew with another schema, under a version that follows it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from sparserow.proto.published.registry import ModelRegistry
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.follow_options import FollowOptions
from sparserow.serving.live_sync import Follower
from sparserow.serving.loaded_version import LoadedVersion, load_version
from sparserow_process import wait_until

KEYS = np.arange(64, dtype=np.uint64)


def write(cluster: sr.LocalCluster, dim: int) -> None:
    with sr.connect(cluster.address, "ads", staleness=None) as session:
        table = session.create_table("user", dim=dim, optimizer=sr.SGD(lr=0.5))
        table.assign(KEYS, np.ones((len(KEYS), dim), np.float32))


def rows_of(version: LoadedVersion, table: str) -> np.ndarray:
    return version.store.pull(version.tables[table].schema.id, KEYS)[0]


@contextlib.contextmanager
def followed(session: sr.Session, cluster: sr.LocalCluster, root: Path) -> Iterator[tuple[LoadedVersion, Follower]]:
    """Publishes the tables, and follows them once around."""
    sr.publish(session, "ctr", root=str(root))
    registry, place = ModelRegistry(str(root)), ShardAssignment()
    version = load_version(registry, registry.manifest("ctr", 1), place)
    follower = Follower(version, place.owned(64), FollowOptions(cluster.address, "test", retry_sec=0.01))
    try:
        wait_until(lambda: follower.is_complete, "the first round")
        yield version, follower
    finally:
        follower.close()


def test_a_table_with_another_dim_is_told_once_and_stays_a_problem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sr.local_cluster(shards=1, slot_count=64) as cluster:
        write(cluster, 4)
        with (
            sr.connect(cluster.address, "ads", staleness=None) as session,
            followed(session, cluster, tmp_path) as (_, follower),
        ):
            session.drop_table("user")
            write(cluster, 8)
            with caplog.at_level(logging.WARNING):
                begun = follower.stats().reopened
                wait_until(lambda: follower.stats().reopened > begun + 8, "tries to follow")
            told = [record.getMessage() for record in caplog.records if "trying again" in record.getMessage()]
            assert len(told) <= 1, "a line says it, not one for each try"
            assert "dim 8" in follower.problem


def test_rows_of_a_table_that_training_drops_stay_and_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sr.local_cluster(shards=2, slot_count=64) as cluster:
        write(cluster, 4)
        with sr.connect(cluster.address, "ads", staleness=None) as session:
            other = session.create_table("item", dim=4, optimizer=sr.SGD(lr=0.5))
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
