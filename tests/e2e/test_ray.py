"""A cluster on a real Ray cluster of several nodes: a node is gone, and the job goes on.

A node is removed as a machine is: with its raylet, everything that it had started is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import sparserow as sr
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.control import ControlClient
from sparserow_process import Launcher, wait_until

ray = pytest.importorskip("ray")

FULL = bool(os.environ.get("SPARSEROW_TEST_FULL"))
KEYS = np.arange(400, dtype=np.uint64)
ONES = np.ones((len(KEYS), 4), np.float32)


class Nodes:
    """A Ray cluster: a head, and nodes with a CPU each."""

    def __init__(self, count: int, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        for _ in range(count):
            self.cluster.add_node(num_cpus=cpus)
        self.address = self.cluster.address

    def kill_node_of(self, pid: int) -> None:
        """The machine that runs the process is gone."""
        ancestors = {process.pid for process in psutil.Process(pid).parents()}
        for node in self.cluster.list_all_nodes():
            (raylet,) = node.all_processes["raylet"]
            if raylet.process.pid in ancestors:
                there = psutil.Process(raylet.process.pid).children(recursive=True)
                self.cluster.remove_node(node, allow_graceful=False)
                for process in there:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                return
        raise AssertionError(f"no node has started process {pid}")


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes(3, 2 if FULL else 1)
    yield made
    made.cluster.shutdown()


def test_up_on_ray_outlives_a_node(nodes: Nodes, launcher: Launcher, tmp_path: Path) -> None:
    leases = ("--worker-lease=3s", "--shard-lease=2s", "--slot-count=64")
    up = launcher.start("up", f"--on={nodes.address}", "--shards=2", "--insecure", *leases)
    address = up.wait_for(r"ready at (\S+:\d+)")[1]
    with ControlClient(address) as control:
        with sr.connect(address, "ray", staleness=None, deadline_sec=60.0) as session:
            table = session.create_table("rows", dim=4, optimizer=sr.SGD(lr=1.0), init=sr.Constant(0.0))
            table.push(KEYS, ONES)
            sr.keep_rows(session, str(tmp_path / "kept"), every_sec=3600)
            wait_until(lambda: len(files.list_names(Folder(str(tmp_path / "kept")))) == 1, "rows that are saved")
            table.push(KEYS, ONES)
            before = control.status().shards[1]
            nodes.kill_node_of(before.pid)
            table.push(KEYS, ONES)
            np.testing.assert_array_equal(table.pull(KEYS), -3 * ONES)
        after = control.status().shards
        assert after[1].pid != before.pid
        assert [shard.restores for shard in after][1] == 1
    up.signal(signal.SIGTERM)
    assert up.end() == 0, up.err
    assert "shard 1 is " in up.out
    wait_until(lambda: not any("sparserow" in " ".join(each.cmdline()) for each in launcher.living()), "no server left")


def test_bad_input_is_one_line(launcher: Launcher) -> None:
    for arguments, words in (
        (("--on=127.0.0.1:1",), "--on 127.0.0.1:1: Ray cannot be reached"),
        (("--on=auto", "--port=7001"), "--port, --advertise, --metrics-port: have no effect with --on"),
        (("--on=auto", "--strategy=WIDE"), "strategy: 'WIDE' is not allowed; allowed: SPREAD, STRICT_SPREAD, PACK"),
        (("--serve=ads",), "have no effect without --on"),
        (("--on=auto", "--serve=ads"), "ServingOptions: give root, or namespace"),
    ):
        if arguments == ("--on=127.0.0.1:1",) and not FULL:  # Ray tries for half a minute
            continue
        assert words in launcher.start("up", *arguments).error_line()
