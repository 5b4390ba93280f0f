"""Two publications at once, and two moves of aliases at once: each has its own, and none undoes the other's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from sparserow.proto.control import ControlClient
from sparserow.proto.published.registry import ModelRegistry
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.loaded_version import load_version
from sparserow.worker.publish.publishing import Publication, publish_from
from sparserow_process import Launcher

KEYS = np.arange(300, dtype=np.uint64)


def test_a_publication_that_fails_leaves_the_one_beside_it_alone(tmp_path: Path) -> None:
    root = str(tmp_path)
    both, failed = threading.Barrier(2), threading.Event()

    def publish(fails: bool) -> int:
        def progress(_: int) -> None:  # rows are written
            if both.broken or failed.is_set():
                return
            both.wait(60)
            if fails:
                raise RuntimeError("it is killed, say")
            assert failed.wait(60)

        with ControlClient(cluster.address) as control:
            return publish_from(control, "ads", Publication("ctr", root), progress).version

    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        table = session.create_table("user", dim=4, optimizer=sr.optim.SGD())
        table.assign(KEYS, np.ones((len(KEYS), 4), np.float32))
        with ThreadPoolExecutor(2) as threads:
            good, bad = threads.submit(publish, False), threads.submit(publish, True)
            with pytest.raises(RuntimeError, match="killed, say"):
                bad.result(120)
            failed.set()
            version = good.result(120)
        registry = ModelRegistry(root)
        assert registry.versions("ctr") == [version]
        loaded = load_version(registry, registry.manifest("ctr", version), ShardAssignment())
        assert loaded.store.stats()[0].rows == len(KEYS)
        assert registry.resolve("ctr", "live").version == version
        assert publish_from(session.core.catalog, "ads", Publication("ctr", root)).version == 3, "numbers are used once"


def test_commands_that_move_aliases_at_once_all_count(tmp_path: Path, launcher: Launcher) -> None:
    root = str(tmp_path)
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        session.create_table("user", dim=4, optimizer=sr.optim.SGD())
        session.publish("ctr", root=root)
    names = [f"team-{number}" for number in range(6)]
    commands = [launcher.start("alias", f"ctr@{name}", "1", f"--root={root}") for name in names]
    assert [command.end() for command in commands] == [0] * len(names)
    assert sorted(ModelRegistry(root).aliases("ctr")) == sorted(["live", *names])
