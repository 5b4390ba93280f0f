"""``sparserow up`` and ``local_cluster``: ready, stopped, and nothing left behind however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from sparserow.deploy.launch.local_cluster import LocalCluster, local_cluster
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import InvalidArgument, Unavailable
from sparserow_process import DEADLINE_SEC, MARK, Launcher, Process, wait_until

pytestmark = pytest.mark.started


@pytest.fixture(autouse=True)
def nothing_left(launcher: Launcher) -> Iterator[None]:
    """Fails a test that leaves a process behind."""
    yield
    wait_until(lambda: not launcher.living(), f"the end of {launcher.living()}")


def start_up(launcher: Launcher, shards: int = 2) -> tuple[Process, str]:
    process = launcher.start("up", f"--shards={shards}", "--port=0")
    return process, process.wait_for(r"ready at (\S+:\d+)")[1]


def children(process: Process) -> list[psutil.Process]:
    return psutil.Process(process.popen.pid).children(recursive=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_is_ready_and_stops_cleanly(launcher: Launcher, number: signal.Signals) -> None:
    process, address = start_up(launcher)
    with ControlClient(address) as client:
        assert [shard.index for shard in client.cluster().shards] == [0, 1]
    assert len(children(process)) == 2
    with urllib.request.urlopen(process.wait_for(r"page at (http://127\.0\.0\.1:\d+/)\n")[1], timeout=60) as page:
        assert b"<title>Sparserow</title>" in page.read()
    process.signal(number)
    assert process.end() == 0
    assert process.out.splitlines()[-1] == "sparserow: stopped"
    assert process.complaints == []
    assert launcher.living() == []


def test_children_end_with_a_killed_parent(launcher: Launcher) -> None:
    process, _ = start_up(launcher, shards=3)
    assert len(children(process)) == 3
    process.signal(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL
    wait_until(lambda: not launcher.living(), "the children to end")


def test_a_child_started_late_does_not_outlive_a_dead_parent(launcher: Launcher) -> None:
    # As if the parent had ended before the child could ask the kernel to follow it.
    process = launcher.start("ps", "--coordinator=127.0.0.1:1", "--shard=0", "--die-with-parent=1")
    assert process.end() == 1
    assert process.complaints == []


def test_a_shard_that_ends_stops_the_cluster_with_an_error(launcher: Launcher) -> None:
    process, _ = start_up(launcher)
    children(process)[0].kill()
    line = process.error_line()
    assert (
        "ended by SIGKILL; its rows are lost, so the cluster was stopped; start a new one, and restore a checkpoint"
        in line
    )
    assert launcher.living() == []


def test_a_shard_that_cannot_start_stops_the_cluster(launcher: Launcher) -> None:
    process = launcher.start("up", "--shards=2", "--port=0", "--metrics-port=65534")
    assert process.end() == 1
    assert "shard 1 ended with exit code" in process.err
    assert launcher.living() == []


SCRIPT = """
import os, sys, time
from sparserow.deploy.launch.local_cluster import LocalCluster, local_cluster
with local_cluster(shards=2) as cluster:
    print(cluster.address, *cluster.shard_pids, cluster.pid, flush=True)
    {body}
"""


def start_script(launcher: Launcher, body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=launcher.environment,
    )


def first_line(script: subprocess.Popen[str]) -> list[str]:
    assert script.stdout is not None
    return script.stdout.readline().split()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_local_cluster_ends_with_its_script(launcher: Launcher, number: signal.Signals) -> None:
    script = start_script(launcher, "time.sleep(600)")
    assert len(first_line(script)) == 4
    assert len(launcher.living()) == 4
    script.send_signal(number)
    script.communicate(timeout=DEADLINE_SEC)
    wait_until(lambda: not launcher.living(), "the cluster to end")


def test_a_local_cluster_ends_although_a_fork_of_its_script_lives(launcher: Launcher) -> None:
    # The fork keeps the script's end of the link open, so only the parent watch can tell.
    script = start_script(
        launcher, "pid = os.fork() or time.sleep(300) or os._exit(0); print(pid, flush=True); time.sleep(600)"
    )
    first = first_line(script)
    fork = int(first_line(script)[0])
    script.kill()
    script.wait(DEADLINE_SEC)
    cluster = {int(pid) for pid in first[1:]}
    wait_until(lambda: not cluster & {process.pid for process in launcher.living()}, "the cluster to end")
    os.kill(fork, signal.SIGKILL)
    script.communicate(timeout=DEADLINE_SEC)


def test_a_script_that_fails_stops_its_cluster(launcher: Launcher) -> None:
    script = start_script(launcher, "raise ValueError('of the script')")
    _, err = script.communicate(timeout=DEADLINE_SEC)
    assert script.returncode == 1
    assert err.splitlines()[-1] == "ValueError: of the script"
    assert launcher.living() == []


def test_a_script_without_stopping_is_no_reason_to_stay(launcher: Launcher) -> None:
    script = start_script(launcher, "os._exit(3)")
    script.communicate(timeout=DEADLINE_SEC)
    assert script.returncode == 3


@pytest.fixture
def marked(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process's children carry the launcher's mark."""
    monkeypatch.setenv(MARK, launcher.mark)


def has_given_up(cluster: LocalCluster) -> bool:
    try:
        cluster.check()
    except Unavailable:
        return True
    return False


@pytest.mark.usefixtures("marked")
def test_a_dead_shard_fails_the_block(launcher: Launcher) -> None:
    with (  # noqa: PT012 - the end of the block is what raises
        pytest.raises(Unavailable, match="shard 1 ended by SIGKILL"),
        local_cluster(shards=2) as cluster,
    ):
        assert len(launcher.living()) == 3
        cluster.check()
        os.kill(cluster.shard_pids[1], signal.SIGKILL)
        wait_until(lambda: has_given_up(cluster), "the cluster to give up")


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shards": 0}, "shards: 0 is not allowed"),
        ({"memory_budget": "much"}, "memory_budget: 'much' is not allowed"),
        ({"slot_count": 3}, "slot_count: 3 is not allowed"),
        ({"slot_count": 2, "shards": 3}, r"shards: 3 is not allowed; allowed: \[1, slot_count \(2\)\]"),
        ({"log_level": "loud"}, "level: 'loud' is not allowed"),
    ],
)
def test_bad_options_raise_at_once(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words), local_cluster(**options):
        pass


@pytest.mark.usefixtures("marked")
def test_a_taken_port_raises(launcher: Launcher) -> None:
    with local_cluster(shards=1) as cluster:
        port = int(cluster.address.rpartition(":")[2])
        with pytest.raises(Unavailable, match=f"cannot listen on {cluster.address}"), local_cluster(port=port):
            pass
        assert len(launcher.living()) == 2
