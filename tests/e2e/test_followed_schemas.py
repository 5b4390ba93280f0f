"""A table that training makes anew with another schema under a version that follows it."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import sparserow as sr
from sparserow.proto.published.registry import ModelRegistry
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.follow_options import FollowOptions
from sparserow.serving.live_sync import Follower
from sparserow.serving.loaded_version import load_version
from sparserow_process import wait_until

KEYS = np.arange(64, dtype=np.uint64)


def write(cluster: sr.LocalCluster, dim: int) -> None:
    with sr.connect(cluster.address, "ads", staleness=None) as session:
        table = session.create_table("user", dim=dim, optimizer=sr.SGD(lr=0.5))
        table.assign(KEYS, np.ones((len(KEYS), dim), np.float32))


def test_a_table_with_another_dim_is_told_once_and_stays_a_problem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(tmp_path)
    with sr.local_cluster(shards=1, slot_count=64) as cluster:
        write(cluster, 4)
        with sr.connect(cluster.address, "ads", staleness=None) as session:
            sr.publish(session, "ctr", root=root)
            registry, place = ModelRegistry(root), ShardAssignment()
            version = load_version(registry, registry.manifest("ctr", 1), place)
            follower = Follower(version, place.owned(64), FollowOptions(cluster.address, "test", retry_sec=0.01))
            try:
                wait_until(lambda: follower.is_complete, "the first round")
                session.drop_table("user")
                write(cluster, 8)
                with caplog.at_level(logging.WARNING):
                    begun = follower.stats().reopened
                    wait_until(lambda: follower.stats().reopened > begun + 8, "tries to follow")
                told = [record.getMessage() for record in caplog.records if "trying again" in record.getMessage()]
                assert len(told) <= 1, "a line says it, not one for each try"
                assert "dim 8" in follower.problem
            finally:
                follower.close()
