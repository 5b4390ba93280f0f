"""Prometheus pages of the processes that test_control_plane and test_serving do not ask: gateway and workers."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

import sparserow as sr
from metrics_pages import page, value
from sparserow.deploy.train.training_run import run_worker
from sparserow.proto import rows_pb2 as pb, rows_pb2_grpc as pb_grpc
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data import write_click_log
from sparserow.worker.training.process_group import joined_group
from sparserow.worker.training.training_report import EpochResult
from sparserow_process import Launcher, free_port, wait_until

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"


def test_a_gateway_counts_calls_rows_and_errors(launcher: Launcher) -> None:
    port, metrics = free_port(), free_port()
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        session.create_table("user", dim=4, optimizer=sr.optim.SGD(lr=0.5))
        gateway = launcher.start(
            "gateway", f"--coordinator={cluster.address}", f"--port={port}", f"--metrics-port={metrics}"
        )
        gateway.wait_for(r"gateway ready at gRPC \S+")
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.RowsStub(channel)
            stub.Pull(pb.PullRowsRequest(namespace="ads", table="user", keys=[1, 2, 3]), timeout=60)
            push = pb.PushRowsRequest(
                namespace="ads", table="user", client="c", sequence=1, keys=[1], grads=b"\0" * 16, lr=0.1
            )
            for _ in range(2):
                stub.Push(push, timeout=60)
            with pytest.raises(grpc.RpcError):
                stub.Pull(pb.PullRowsRequest(namespace="ads", table="none", keys=[1]), timeout=60)
        samples = page(metrics)
        gateway.signal(signal.SIGTERM)
        assert gateway.end() == 0
    assert value(samples, "sparserow_gateway_rows_total", method="Pull") == 3
    assert value(samples, "sparserow_gateway_request_seconds_count", method="Push") == 2
    assert value(samples, "sparserow_gateway_errors_total", method="Pull", code="NotFound") == 1
    assert value(samples, "sparserow_gateway_pushes_repeated_total") == 1
    assert value(samples, "sparserow_gateway_clients") == 1


class _Requests:
    """An observer that reads the page when the evaluation begins."""

    def __init__(self, port: int) -> None:
        self._port, self.samples = port, {}

    def batch(self, **figures: Any) -> None: ...

    def evaluating(self, epoch: int) -> None:  # noqa: ARG002 - the protocol
        self.samples = page(self._port)

    def epoch(self, result: EpochResult) -> None: ...


def test_a_worker_tells_how_training_goes(tmp_path: Path) -> None:
    log = write_click_log(tmp_path, rows=2_000, test_rows=200, seed=3)
    port = free_port()
    settings = [
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.args.rows={'*': 5000}",
        "model.min_rows=1",
        "model.backend=ps",
    ]
    job = load_config(JobConfig, JOBS / "demo.yaml", [*settings, f"train.metrics_port={port}", "train.batch_size=128"])
    asks = _Requests(port)
    with sr.local_cluster(shards=1) as cluster, joined_group(0, 1, "") as group:
        run_worker(job, group, local_world=2, coordinator=cluster.address, observer=asks)
    assert value(asks.samples, "sparserow_train_epoch", rank="0") == 1
    labels = {"namespace": "demo", "rank": "0"}
    assert value(asks.samples, "sparserow_session_steps_committed_total", **labels) == 16  # 2000 / 128
    assert value(asks.samples, "sparserow_session_rows_pulled_total", **labels) > 1000
    assert page(port) == {}  # it ended with the job


@pytest.mark.full("two workers")
def test_each_worker_of_a_job_has_a_page(launcher: Launcher, tmp_path: Path) -> None:
    log = write_click_log(tmp_path, rows=5_000, test_rows=500, seed=3)
    port = free_port()
    settings = [
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.args.rows={'*': 20000}",
        "train.batch_size=64",
    ]
    settings += ["train.epochs=10000", "train.workers=2", "train.threads=1", f"train.metrics_port={port}"]
    sets = [part for setting in settings for part in ("--set", setting)]
    job = launcher.start("train", str(JOBS / "demo.yaml"), *sets)
    for rank in range(2):
        labels = {"namespace": "demo", "rank": str(rank)}
        wait_until(
            lambda rank=rank, labels=labels: (
                (value(page(port + rank), "sparserow_session_steps_committed_total", **labels) or 0) > 10
            ),
            f"steps of worker {rank}",
        )
    wait_until(lambda: value(page(port), "sparserow_train_loss", rank="0") is not None, "the loss")
    job.signal(signal.SIGINT)
    job.end()
