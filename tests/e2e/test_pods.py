"""Pods of the overlays of deploy/k8s, as processes: with TLS and tokens, without Kubernetes."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from kubernetes_manifests import FOLDER, Manifests
from local_pods import LocalPods
from sparserow.deploy.launch.security_files import add_token, init_security
from sparserow.proto.security.security import use_security
from sparserow.worker.data import write_click_log
from sparserow_process import Launcher, Process, wait_until


@pytest.fixture
def secrets(tmp_path: Path) -> Iterator[Path]:
    """The folder of the secrets, which this process uses as a trainer."""
    folder = tmp_path / "security"
    init_security(folder, ["127.0.0.1"], valid_sec=3600)
    add_token(folder / "tokens.yaml", "trainers", "train", (), output=folder / "trainer.token")
    (folder / "trainer.yaml").write_text("ca: ca.pem\ntoken_file: trainer.token\n")
    use_security(folder / "trainer.yaml")
    yield folder
    use_security(None)


@pytest.mark.full("tests/contract/test_kubernetes.py checks the same command lines")
def test_the_trial_trains_and_serves_without_storage(launcher: Launcher, tmp_path: Path, secrets: Path) -> None:
    made = Manifests("small")
    pods = LocalPods(made, tmp_path)
    write_click_log(tmp_path / "shared" / "data", rows=2_000)
    job = tmp_path / "job.yaml"
    job.write_text(pods.text((FOLDER / "base" / "job.yaml").read_text()))
    (tmp_path / "coordinator-0" / "state").mkdir(parents=True)
    launcher.start(*pods.arguments("coordinator-0")).wait_for("coordinator at")
    for pod in pods.pods_of("ps"):
        launcher.start(*pods.arguments(pod))
    torchrun = made.container_of("train")["args"]
    words = [pods.text(word) for word in torchrun[torchrun.index("sparserow.deploy.cli") + 1 :]]
    words[0] = f"--security={secrets / 'trainer.yaml'}"
    trained = launcher.start(*(str(job) if word == "/job/job.yaml" else word for word in words))
    assert trained.end() == 0, trained.err
    launcher.start(*pods.arguments("serve")).wait_for("serving ads@live ready at")
    with (
        sr.connect(pods.address("coordinator.sparserow.svc:7000"), "ads", staleness=None) as session,
        sr.ServingClient(pods.address("serve.sparserow.svc:7100"), model="ads") as client,
    ):
        name = next(iter(client.tables()))
        keys = np.arange(50, dtype=np.uint64)
        np.testing.assert_array_equal(client.lookup(name, keys).rows, session.table(name).pull(keys))


@pytest.mark.started
@pytest.mark.skipif(shutil.which("etcd") is None, reason="needs the program etcd (Debian: etcd-server)")
def test_the_second_coordinator_leads_when_the_first_one_ends(
    launcher: Launcher, tmp_path: Path, secrets: Path
) -> None:
    made = Manifests("etcd")
    pods = LocalPods(made, tmp_path)
    (tmp_path / "shared").mkdir()
    members = []
    try:
        for pod in pods.pods_of("etcd"):
            (tmp_path / pod / "data").mkdir(parents=True, mode=0o700)
            members.append(subprocess.Popen(["etcd", "--log-level=error", *pods.arguments(pod)]))
        coordinators: dict[str, Process] = {}
        for pod in pods.pods_of("coordinator"):
            coordinators[pod] = launcher.start(*pods.arguments(pod))
            coordinators[pod].wait_for("one of those at etcds://")
        for pod in pods.pods_of("ps"):
            launcher.start(*_without_ssd(pods.arguments(pod)))
        wait_until(lambda: any(_IS_READY in each.err for each in coordinators.values()), "both shards")
        (address,) = {word.partition("=")[2] for word in pods.arguments("ps-0") if word.startswith("--coordinator=")}
        keys = np.arange(9, dtype=np.uint64)
        with sr.connect(address, "ads", staleness=None) as session:
            table = session.create_table("clicks", dim=4, optimizer=sr.optim.SGD(lr=1.0))
            table.push(keys, np.ones((9, 4), np.float32))
            rows = table.pull(keys)
        # On a busy machine etcd may have chosen another one meanwhile.
        second, first = sorted(coordinators.values(), key=_led_at)
        before = second.err.count(_IS_READY)
        first.signal(signal.SIGKILL)
        wait_until(lambda: second.err.count(_IS_READY) > before, "the second coordinator to lead both shards")
        with sr.connect(address, "ads", staleness=None) as session:
            np.testing.assert_array_equal(session.table("clicks").pull(keys), rows)
    finally:
        for member in members:
            member.kill()
            member.wait()


_IS_READY = "the cluster is ready: all 2 shards serve"


def _led_at(coordinator: Process) -> str:
    """When a coordinator began to lead the last time; "" where it never did."""
    return max((line for line in coordinator.err.splitlines() if "this coordinator leads" in line), default="")


def _without_ssd(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith(("--ssd-", "--memory-budget"))]
