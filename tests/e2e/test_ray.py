"""A cluster on a real Ray cluster of several nodes: a node is gone, and the job goes on.

A node is removed as a machine is: with its raylet, everything that it had started is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import sparserow as sr
from long_form import FULL
from sparserow.deploy.ray import RayOptions, ray_cluster, train_on_ray
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.config.cluster_config import ClusterConfig
from sparserow.proto.config.job import JobConfig
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import InvalidArgument, NotFound, SparserowError
from sparserow.proto.options.document import load_config
from sparserow.worker.data import write_click_log
from sparserow_process import Launcher, free_port, wait_until

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before Ray is there: tests tell nobody
ray = pytest.importorskip("ray")

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"
KEYS = np.arange(400, dtype=np.uint64)
ONES = np.ones((len(KEYS), 4), np.float32)


class Nodes:
    """A Ray cluster: a head, and nodes with so many CPUs each."""

    def __init__(self, count: int, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self.clients = free_port()
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "ray_client_server_port": self.clients, "include_dashboard": False},
        )
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


def servers(command: str = "") -> list[psutil.Process]:
    """Of this package, on all nodes; with a command, those of it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()  # once, because a process that was killed may have none the next time
            if "sparserow.deploy.cli" in words and "up" not in words and (not command or command in words):
                found.append(process)
    return found


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes(3, cpus=2)
    yield made
    made.cluster.shutdown()


@pytest.fixture(scope="module")
def wide_node() -> Iterator[Nodes]:
    """A cluster of one node, for tests whose jobs it outlives."""
    made = Nodes(1, cpus=32)
    yield made
    made.cluster.shutdown()


def is_ready(control: ControlClient) -> bool:
    try:
        return control.status().ready
    except SparserowError:
        return False


@pytest.mark.parametrize("dial", ["{address}", "ray://127.0.0.1:{clients}"] if FULL else ["{address}"])
def test_up_on_ray_outlives_a_node(nodes: Nodes, launcher: Launcher, tmp_path: Path, dial: str) -> None:
    ray_address = dial.format(address=nodes.address, clients=nodes.clients)
    leases = ("--worker-lease=20s", "--shard-lease=6s", "--slot-count=64")
    serves = ("--serve=live", "--serve-namespace=ray")
    up = launcher.start(
        *("up", f"--on={ray_address}", "--shards=2", "--insecure", *leases, *serves, f"--checkpoint-root={tmp_path}")
    )
    wait_until(lambda: "ready at" in up.out or up.popen.poll() is not None, "a cluster on Ray", 600)
    address = up.wait_for(r"ready at (\S+:\d+)")[1]
    with ControlClient(address) as control:
        wait_until(lambda: is_ready(control), "the cluster to be ready")
        with sr.connect(address, "ray", staleness=None, deadline_sec=300.0) as session:
            table = session.create_table("rows", dim=4, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
            table.push(KEYS, ONES)
            session.keep_rows(str(tmp_path / "kept"), every_sec=3600)
            wait_until(lambda: len(files.list_names(Folder(str(tmp_path / "kept")))) == 1, "rows that are saved")
            table.push(KEYS, ONES)
            before = control.status().shards[1]
            nodes.kill_node_of(before.pid)
            table.push(KEYS, ONES)
            np.testing.assert_array_equal(table.pull(KEYS), -3 * ONES)

            (coordinator,) = servers("coordinator")
            coordinator.kill()
            wait_until(lambda: set(servers("coordinator")) - {coordinator}, "another coordinator")
            wait_until(lambda: is_ready(control), "the shards to have found it, at the same address")
            np.testing.assert_array_equal(table.pull(KEYS), -3 * ONES)
            serving = up.wait_for(r"serving 0 is at (\S+:\d+)")[1]  # it was started until there was a table
            with sr.ServingClient(serving) as client:
                wait_until(lambda: np.array_equal(client.lookup("rows", KEYS).rows, -3 * ONES), "the rows of now")
        after = control.status().shards
        assert after[1].pid != before.pid
        assert [shard.restores for shard in after][1] == 1
    up.signal(signal.SIGTERM)
    assert up.end() == 0, up.err
    assert "shard 1 is " in up.out
    wait_until(lambda: not servers(), "no server left")


@pytest.mark.full
def test_workers_of_ray_train_go_back_together(nodes: Nodes, launcher: Launcher, tmp_path: Path) -> None:
    """At staleness 0 the result is that of the run whose nodes all lived."""
    log = write_click_log(tmp_path, rows=60 * 2 * 64, test_rows=1500, seed=3)
    settings = [
        *(
            f"data.train={log.train}",
            f"data.test={log.test}",
            "model.args.rows={'*': 3000}",
            "model.min_rows=1",
            "train.batch_size=64",
        ),
        *("train.workers=2", "train.threads=1"),
    ]
    keeps = f"train.checkpoint={{url: '{tmp_path / 'ckpt'}', every_steps: 5, keep: 2}}"
    job = load_config(JobConfig, JOBS / "demo.yaml", [*settings, keeps])
    ray.init(address=nodes.address, log_to_driver=False)
    try:
        cluster = ClusterConfig(
            shards=2,
            slot_count=64,
            shard_lease=2.0,
            worker_lease=3.0,
            checkpoint_roots=(str(tmp_path / "ckpt"),),
        )
        with ray_cluster(RayOptions(cluster, insecure=True)) as running:
            killed: list[int] = []

            def kill_a_node() -> None:
                wait_until(lambda: files.list_names(Folder(str(tmp_path / "ckpt"))), "a checkpoint", 300)
                with ControlClient(running.address) as control:
                    killed.append(control.status().shards[1].pid)
                nodes.kill_node_of(killed[0])

            killer = threading.Thread(target=kill_a_node)
            killer.start()
            result = train_on_ray(job, running.address, storage_path=str(tmp_path / "ray"))
            killer.join()
            assert len(killed) == 1
            with pytest.raises(InvalidArgument, match="a job on Ray uses neither a cluster of its own"):
                train_on_ray(load_config(JobConfig, JOBS / "demo.yaml", [*settings, "cluster.shards=2"]), "a:1")
    finally:
        ray.shutdown()
    plain = tmp_path / "plain.json"
    assigned = [part for setting in [*settings, "cluster.slot_count=64"] for part in ("--set", setting)]
    run = launcher.start("train", str(JOBS / "demo.yaml"), *assigned, f"--json={plain}")
    assert run.end() == 0, run.err
    assert result["test_auc"] == json.loads(plain.read_text())["test_auc"]


@pytest.mark.parametrize("saves", [False, True] if FULL else [False])
def test_the_example_of_the_page(
    wide_node: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """It runs as docs/ray.md has it, beside a job file, with a section train.checkpoint or none."""
    log = write_click_log(tmp_path, rows=2000, test_rows=500, seed=3)
    keeps = f", checkpoint: {{url: '{tmp_path / 'ckpt'}', every_steps: 5}}" if saves else ""
    (tmp_path / "job.yaml").write_text(
        f"data: {{format: criteo, train: {log.train}, test: {log.test}}}\n"
        f"model: {{class: DLRM, args: {{rows: {{'*': 1000}}}}, min_rows: 1}}\n"
        f"train: {{workers: 2, threads: 1, batch_size: 128, epochs: 3{keeps}}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", wide_node.address)
    page = (Path(__file__).resolve().parents[2] / "docs" / "ray.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    try:
        exec(compile(block.replace('"/ckpt"', repr(str(tmp_path / "ckpt"))), "docs/ray.md", "exec"), names)
        assert names["result"]["test_auc"] > 0.5
        assert bool(files.list_names(Folder(str(tmp_path / "ckpt")))) == saves
    finally:
        ray.shutdown()


def test_data_that_are_not_there_are_told_without_a_restart(wide_node: Nodes, tmp_path: Path) -> None:
    keeps = f"train.checkpoint={{url: '{tmp_path / 'ckpt'}', every_steps: 5}}"
    data = [f"data.train={tmp_path / 'nowhere.tsv'}", f"data.test={tmp_path / 'nowhere.tsv'}"]
    job = load_config(JobConfig, JOBS / "demo.yaml", [*data, "train.workers=2", keeps])
    ray.init(address=wide_node.address, log_to_driver=False)
    try:
        with (
            sr.local_cluster(shards=1, checkpoint_roots=(str(tmp_path),)) as cluster,
            pytest.raises(NotFound, match=r"nowhere\.tsv: No such file .*\(on .*, node \d+ of the run"),
        ):
            train_on_ray(job, cluster.address, storage_path=str(tmp_path / "ray"))
    finally:
        ray.shutdown()


def test_bad_input_is_one_line(launcher: Launcher) -> None:
    for arguments, words in (
        (("--on=127.0.0.1:1",), "--on 127.0.0.1:1: Ray cannot be reached"),
        (("--on=auto", "--port=7001"), "--port, --advertise, --metrics-port, --page-port: have no effect with --on"),
        (("--on=auto", "--strategy=WIDE"), "strategy: 'WIDE' is not allowed; allowed: SPREAD, STRICT_SPREAD, PACK"),
        (("--serve=ads",), "have no effect without --on"),
        (("--on=auto", "--serve=ads"), "ServingOptions: give either root, or namespace"),
    ):
        assert words in launcher.start("up", *arguments).error_line()
