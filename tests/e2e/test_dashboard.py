"""Each expression of the Grafana dashboard has something to show while training and serving run."""

from __future__ import annotations

import json
import math
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from subprocess import DEVNULL, Popen
from urllib.parse import urlencode

import grpc
import numpy as np
import pytest

from metrics_pages import Samples, page
from sparserow.proto import rows_pb2 as pb, rows_pb2_grpc as pb_grpc
from sparserow.proto.control import ControlClient
from sparserow.serving.client.client import ServingClient
from sparserow.worker.data import write_click_log
from sparserow_process import Launcher, free_port, free_ports, wait_until

ROOT = Path(__file__).resolve().parents[2]
TABLE = "embeddings.tables.C1"
# Selectors that select nothing in a cluster that is well, and why; their metric is there for others.
MAY_BE_EMPTY = {
    'sparserow_ps_request_seconds_bucket{request="pull_waited"}': "a pull waits where a worker is ahead of the others, "
    "and workers that average gradients meet at each step",
}

# Counters that stand still in this cluster, so that the ratios that are over them are NaN, a gap in a panel.
STAND_STILL = {
    "sparserow_ps_ssd_reads_total": "the rows are in memory",
    "sparserow_session_cache_hits_total": "the job has no row cache",
}


def expressions() -> list[tuple[str, str]]:
    dashboard = json.loads((ROOT / "deploy" / "monitoring" / "dashboard.json").read_text())
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", ())]


def lacking(samples: list[Samples]) -> dict[str, list[str]]:
    """The selectors of each expression that select no sample; of a histogram, none that has counted something."""
    found: dict[str, list[str]] = {}
    for title, expression in expressions():
        for name, matchers in re.findall(r"(sparserow_\w+)(?:\{([^}]*)\})?", expression):
            wanted = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
            values = [
                value
                for each in samples
                for (found_name, labels), value in each.items()
                if found_name == name and wanted.items() <= dict(labels).items()
            ]
            is_empty = not any(values) if name.endswith("_bucket") or f"{name} > 0" in expression else not values
            selector = f"{name}{{{matchers}}}" if matchers else name
            if selector in MAY_BE_EMPTY:
                is_empty = not any(found_name == name for each in samples for found_name, _ in each)
            if is_empty:
                found.setdefault(title, []).append(selector)
    return found


@pytest.fixture
def ports() -> dict[str, int]:
    first = free_port()
    while first + 2 > 60_000:
        first = free_port()
    names = ("gateway", "gateway page", "serving page", "worker")
    return {"up": first, **dict(zip(names, free_ports(len(names)), strict=True))}


@contextmanager
def running(launcher: Launcher, folder: Path, ports: dict[str, int]) -> Iterator[tuple[list[int], Callable[[], None]]]:
    """Training, serving and a gateway: the ports of their pages, and what has a client ask serving and the gateway."""
    (folder / "ssd").mkdir()
    up = launcher.start("up", "--shards=1", "--port=0", f"--metrics-port={ports['up']}", "--memory-budget=64MiB",
                        f"--ssd-path={folder / 'ssd'}", "--ssd-bytes=1GiB")  # fmt: skip
    address = up.wait_for(r"ready at (\S+:\d+)")[1]
    log = write_click_log(folder, rows=4_000, test_rows=500, seed=3)
    settings = (
        f"data.train={log.train}", f"data.test={log.test}", f"cluster={{address: '{address}'}}", "publish.local=null",
        "model.args.rows={'*': 200000}", "model.min_rows=1", "train.batch_size=64", "train.epochs=10000",
        "train.workers=2", "train.threads=1", f"train.metrics_port={ports['worker']}",
        f"train.checkpoint={{url: '{folder / 'saves'}', every_steps: 20}}", "train.test_every={steps: 20}",
    )  # fmt: skip
    launcher.start("train", str(ROOT / "deploy" / "jobs" / "demo.yaml"), *(f"--set={each}" for each in settings))
    with ControlClient(address) as control:
        wait_until(lambda: any(each.name == TABLE for each in control.status().tables), "the tables of the job", 120)
    serve = launcher.start("serve", "--model=demo", f"--follow={address}", "--namespace=demo", "--port=0",
                           f"--metrics-port={ports['serving page']}")  # fmt: skip
    serving = serve.wait_for(r"gRPC (\S+:\d+)")[1]
    gateway = launcher.start("gateway", f"--coordinator={address}", f"--port={ports['gateway']}",
                             f"--metrics-port={ports['gateway page']}")  # fmt: skip
    gateway.wait_for(r"gateway ready at gRPC \S+")
    pages = [ports["up"], ports["up"] + 1, ports["worker"], ports["worker"] + 1, ports["serving page"],
             ports["gateway page"]]  # fmt: skip
    with (
        ServingClient([serving], model="demo") as client,
        grpc.insecure_channel(f"127.0.0.1:{ports['gateway']}") as channel,
    ):
        stub = pb_grpc.RowsStub(channel)

        def ask() -> None:
            client.lookup(TABLE, np.arange(10, dtype=np.uint64))
            with pytest.raises(grpc.RpcError):
                stub.Pull(pb.PullRowsRequest(namespace="demo", table="none", keys=[1]), timeout=60)

        yield pages, ask
    up.signal(signal.SIGTERM)


def until_none(missing: Callable[[], object]) -> None:
    """Waits until nothing is missing; what is missing then is printed."""
    try:
        wait_until(lambda: not missing(), "samples of every expression", 120)
    except AssertionError:
        print("without a sample:", json.dumps(missing(), indent=1))
        raise


def test_no_expression_is_empty_while_training_and_serving_run(
    launcher: Launcher, tmp_path: Path, ports: dict[str, int]
) -> None:
    with running(launcher, tmp_path, ports) as (pages, ask):

        def missing() -> dict[str, list[str]]:
            ask()
            return lacking([page(each) for each in pages])

        until_none(missing)


@pytest.mark.full("the selectors of each expression are tried in the test above")
@pytest.mark.skipif(which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)")
def test_prometheus_itself_finds_values_of_each_expression(
    launcher: Launcher, tmp_path: Path, ports: dict[str, int]
) -> None:
    (port,) = free_ports(1)
    with running(launcher, tmp_path, ports) as (pages, ask):
        targets = [f"127.0.0.1:{each}" for each in pages]
        scrape = {"job_name": "sparserow", "scrape_interval": "1s", "static_configs": [{"targets": targets}]}
        (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))
        command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}",
                   f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
        with Popen(command, stdout=DEVNULL, stderr=DEVNULL) as prometheus:
            try:
                until_none(lambda: ask() or without_value(port))
            finally:
                prometheus.terminate()


def without_value(port: int) -> list[str]:
    """The expressions of which Prometheus finds no value, but for those that may be empty."""
    found = []
    for _, expression in expressions():
        query = urlencode({"query": expression.replace("$__rate_interval", "20s")})
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=60) as reply:
                values = [float(each["value"][1]) for each in json.load(reply)["data"]["result"]]
        except urllib.error.URLError:  # it is not up yet
            values = []
        if all(map(math.isnan, values)) and not any(each in expression for each in (*MAY_BE_EMPTY, *STAND_STILL)):
            found.append(expression)
    return found


def test_what_has_no_sample_is_found() -> None:
    assert len(expressions()) > 40
    assert lacking([])["Loss"] == ["sparserow_train_loss"]
    pulls = {("sparserow_ps_request_seconds_bucket", frozenset({("request", "pull"), ("le", "1")})): 0.0}
    assert 'sparserow_ps_request_seconds_bucket{request="pull"}' in lacking([pulls])["Pulls: p50 and p99"]
