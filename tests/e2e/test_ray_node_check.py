"""The nodes of a real Ray cluster are checked before a job; a node whose process really is slow gets no worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import sparserow as sr
from sparserow.deploy.ray import train_on_ray
from sparserow.deploy.ray.checked_nodes import nodes_to_avoid
from sparserow.proto.config.job import JobConfig
from sparserow.proto.errors import FailedPrecondition
from sparserow.proto.options.document import load_config
from sparserow.worker.data import write_click_log
from sparserow_process import Launcher

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray")

pytestmark = pytest.mark.full
JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"


class SlowedNode:
    """Stops the probe that Ray starts on one node for nine tenths of the time; notes whether a worker runs there."""

    def __init__(self, raylet: int, node_id: str, address: str) -> None:
        self.node_id, self.address = node_id, address
        self._raylet, self._ended = psutil.Process(raylet), threading.Event()
        self.has_worker = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            for process in self._raylet.children():
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    name = " ".join(process.cmdline())
                    self.has_worker |= "TrainWorker" in name
                    if "NodeProbe.measure" in name:
                        os.kill(process.pid, signal.SIGSTOP)
                        time.sleep(0.09)
                        os.kill(process.pid, signal.SIGCONT)


@pytest.fixture
def slowed() -> Iterator[SlowedNode]:
    """A cluster of three nodes with a CPU each, of which one is slow."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    (raylet,) = nodes[1].all_processes["raylet"]
    slow = SlowedNode(raylet.process.pid, nodes[1].node_id, cluster.address)
    yield slow
    slow.end()
    ray.shutdown()
    cluster.shutdown()


def job_of(folder: Path, workers: int) -> JobConfig:
    log = write_click_log(folder, rows=2000, test_rows=500, seed=3)
    return load_config(
        JobConfig,
        JOBS / "demo.yaml",
        [
            *(
                f"data.train={log.train}",
                f"data.test={log.test}",
                "model.args.rows={'*': 1000}",
                "model.min_rows=1",
                "train.threads=1",
            ),
            *(f"train.workers={workers}", "train.node_check={timeout: 40s, slower_than: 3.0}"),
        ],
    )


def test_the_doctor_names_a_slow_node(slowed: SlowedNode, launcher: Launcher, tmp_path: Path) -> None:
    launcher.environment["RAY_ADDRESS"] = slowed.address
    doctor = launcher.start(
        "doctor", "--nodes", "--slower-than=3", "--timeout=40s", f"--json={tmp_path / 'found.json'}"
    )
    assert doctor.end() == 1, doctor.err
    assert "1 of 3 nodes are slow or broken" in doctor.out
    nodes = json.loads((tmp_path / "found.json").read_text())["nodes"]
    (slow,) = (node for node in nodes if node["state"] == "slow")
    assert slow["name"].startswith(f"node {slowed.node_id[:8]} (")
    assert [node["state"] for node in nodes].count("ok") == 2


def test_a_slow_node_is_avoided_or_ends_the_job(
    slowed: SlowedNode, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ray.init(address=slowed.address, log_to_driver=False)
    assert nodes_to_avoid(job_of(tmp_path, 2), 1.0) == [slowed.node_id]
    assert "is slow: matrices took" in capfd.readouterr().out
    with pytest.raises(FailedPrecondition, match=r"is slow: .* room for 2 workers, and train.workers is 3"):
        nodes_to_avoid(job_of(tmp_path, 3), 1.0)


def test_no_worker_runs_on_a_slow_node(slowed: SlowedNode, tmp_path: Path) -> None:
    ray.init(address=slowed.address, log_to_driver=False)
    with sr.local_cluster(shards=1) as cluster:
        result = train_on_ray(job_of(tmp_path, 2), cluster.address, storage_path=str(tmp_path / "ray"))
    assert result["workers"] == 2
    assert not slowed.has_worker
