"""Serving with rows on an SSD: more rows than memory has room for, and the same answers."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from pathlib import Path

import numpy as np

import sparserow as sr
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.row_memory import RowMemory
from sparserow_process import Launcher, free_port, wait_until

DIM, ROWS = 64, 100_000  # 25 MB of weights, in 16 MiB
KEYS = np.arange(ROWS, dtype=np.uint64)


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        lines = reply.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+)\{[^}]*\} (\S+)$", lines, re.MULTILINE)}


def test_answers_are_those_from_memory(tmp_path: Path, launcher: Launcher) -> None:
    root, ssd = str(tmp_path / "models"), tmp_path / "ssd"
    ssd.mkdir()
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((ROWS, DIM)).astype(np.float32)
    tiered = (f"--root={root}", "--model=ctr", "--port=0", "--memory-budget=16MiB", f"--ssd-path={ssd}", "--grace=0s")
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=0.5))
        for part in np.array_split(KEYS, 10):
            table.assign(part, rows[part.astype(np.int64)])
        session.publish("ctr", root=root)
        port = free_port()
        live = (f"--follow={cluster.address}", "--poll=50ms", "--sync-interval=10ms", f"--metrics-port={port}")
        serving = launcher.start("serve", *tiered, *live)
        address = serving.wait_for(r"ready at gRPC (\S+),")[1]
        with sr.ServingClient(address, refresh_sec=0.05) as client:

            def equals(expected: np.ndarray) -> bool:
                order = rng.permutation(ROWS)
                found = client.lookup("user", KEYS[order], deadline_ms=20_000)
                return bool(found.found.all() and (found.rows == expected[order]).all())

            assert equals(rows)
            assert equals(rows)
            folders = list((ssd / "serving-0-1-0").iterdir())
            assert [folder.name.split("-")[0] for folder in folders] == ["ctr@1"]
            figures = metrics(port)
            assert figures["sparserow_serving_bytes"] <= 16 << 20
            assert figures["sparserow_serving_held_rows"] == ROWS
            assert figures["sparserow_serving_ssd_rows"] > ROWS // 5
            changed = rng.choice(KEYS, 5_000, replace=False)  # live sync writes rows that are not in memory too
            table.push(changed, np.ones((len(changed), DIM), np.float32))
            rows[changed.astype(np.int64)] -= 0.5
            wait_until(lambda: equals(rows), "live sync")
            session.publish("ctr", root=root)  # the folder of a version that is given up goes
            wait_until(
                lambda: [folder.name[:5] for folder in (ssd / "serving-0-1-0").iterdir()] == ["ctr@2"], "its folder"
            )
            assert equals(rows)
        serving.signal(signal.SIGKILL)
        serving.end()
        again = launcher.start("serve", *tiered)  # what the killed one left is in nobody's way
        with sr.ServingClient(again.wait_for(r"ready at gRPC (\S+),")[1]) as client:
            assert equals(rows)


def test_what_stands_in_the_way_is_said(tmp_path: Path, launcher: Launcher) -> None:
    common = ("--port=0", f"--root={tmp_path}", "--model=ctr")
    for arguments, words in (
        ((f"--ssd-path={tmp_path}",), "--ssd-path: it needs --memory-budget of at least 16MiB"),
        ((f"--ssd-path={tmp_path}/none", "--memory-budget=1GiB"), "is no folder"),
    ):
        assert words in launcher.start("serve", *common, *arguments).error_line()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    memory = RowMemory(16 << 20, os.fspath(tmp_path))
    store = memory.make_store(64, 7, ShardAssignment(), "a b@1")
    (tmp_path / "serving-0-1-0" / "left-over").mkdir()
    memory.remove_unused(ShardAssignment())
    assert [folder.name for folder in (tmp_path / "serving-0-1-0").iterdir()] == ["a_b@1-0000000000000007"]
    del store
    memory.remove_unused(ShardAssignment())
    assert not list((tmp_path / "serving-0-1-0").iterdir())
