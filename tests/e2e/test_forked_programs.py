"""Programs that are forked (tests/support/forked_programs.py) are what started ones are, but for the imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

import forked_programs
import sparserow as sr
from long_form import FULL
from sparserow_process import Launcher, runs, wait_until

SCRIPT = Path(forked_programs.__file__).with_name("program_facts.py")
CLI = [sys.executable, "-m", "sparserow.deploy.cli"]

pytestmark = pytest.mark.skipif(FULL, reason="the long form forks nothing")


@pytest.fixture(autouse=True)
def forked_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first case of each command is forked."""
    monkeypatch.setattr(forked_programs._forking, "started_once", None)


def run(
    *arguments: str, is_forked: bool, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    way: AbstractContextManager[None] = nullcontext() if is_forked else forked_programs.as_started()
    command = [sys.executable, str(SCRIPT), *arguments]
    with way:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False, **options
        )


@pytest.mark.parametrize("is_leader", [False, True])
def test_a_fork_finds_what_a_started_program_finds(tmp_path: Path, is_leader: bool) -> None:
    environment = {**os.environ, "SPARSEROW_TEST_WORD": "a=b", "PYTHONUNBUFFERED": "1"}
    said = []
    for is_forked in (False, True):
        with open("/dev/null") as other:
            done = run(
                "exit",
                "3",
                is_forked=is_forked,
                environment=environment,
                input="lines\nof input",
                cwd=tmp_path,
                start_new_session=is_leader,
                pass_fds=(other.fileno(),),
            )
        assert (done.returncode, done.stderr) == (3, "")
        said.append(json.loads(done.stdout))
    started, forked = said
    assert forked == started
    assert forked["parent"] == os.getpid()
    assert forked["leads"] == is_leader
    assert forked["read"] == "lines\nof input"
    assert "SPARSEROW_TEST_WORD=a=b" in forked["shown"]


@pytest.mark.parametrize(
    ("way", "code", "words"), [("raise", 1, "ValueError: of the program"), ("interrupt", -2, "KeyboardInterrupt")]
)
def test_a_fork_ends_as_a_started_program(way: str, code: int, words: str) -> None:
    for is_forked in (False, True):
        done = run(way, is_forked=is_forked)
        assert done.returncode == code
        assert done.stderr.startswith("Traceback (most recent call last):\n")
        assert words in done.stderr


def test_forks_get_signals_and_draw_their_own_numbers() -> None:
    command = [sys.executable, str(SCRIPT), "wait"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["parent"] == os.getpid()
        assert loads_torch(process.pid), "it was started"
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    first, second = (json.loads(run("draw", is_forked=True).stdout) for _ in range(2))
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_threads_that_start_programs_get_their_own() -> None:
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda code: run("exit", str(code), is_forked=True).returncode, range(24)))
    assert codes == list(range(24))


def servers_of(process: psutil.Process) -> list[psutil.Process]:
    """The parameter servers below a process."""
    return [each for each in process.children(recursive=True) if "ps" in each.cmdline()]


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as cluster:
        yield cluster


def test_a_forked_cluster_starts_forked_shards_without_torch(cluster: sr.LocalCluster) -> None:
    coordinator = psutil.Process(cluster.pid)
    assert coordinator.ppid() == os.getpid()
    assert {each.ppid() for each in map(psutil.Process, cluster.shard_pids)} == {cluster.pid}
    for pid in (cluster.pid, *cluster.shard_pids):
        assert psutil.Process(pid).cmdline()[:3] == CLI
        assert not loads_torch(pid)
        assert psutil.Process(pid).create_time() > 0
    assert "fork_server" not in " ".join(psutil.Process(cluster.pid).cmdline())


def test_forked_shards_die_with_their_coordinator(launcher: Launcher) -> None:
    up = launcher.start("up", "--port=0", "--shards=2")
    up.wait_for("ready at")
    below = psutil.Process(up.popen.pid).children(recursive=True)
    assert len(servers_of(psutil.Process(up.popen.pid))) == 2
    assert {each.pid for each in launcher.living()} >= {
        up.popen.pid,
        *(each.pid for each in below if "ps" in each.cmdline()),
    }
    up.popen.kill()
    assert up.end() == -signal.SIGKILL
    wait_until(lambda: not any(map(runs, below)), "the end of the shards")


def test_a_program_learns_the_end_of_forks_of_another_image() -> None:
    """They are children of a fork server of the tests' process, and not of the program that asked for them."""
    started, forked = (json.loads(run("start", is_forked=is_forked).stdout) for is_forked in (False, True))
    assert forked == started
    assert forked["up"] == ["sparserow: shard 0"[:17], None, "TimeoutExpired", -signal.SIGKILL, -signal.SIGKILL]


def test_what_cannot_be_as_in_the_image_is_started(tmp_path: Path) -> None:
    """A variable that a library read at its import, another interpreter, and a path with modules of its own."""
    command = [sys.executable, str(SCRIPT)]
    assert forked_programs.will_fork(command, os.environ)
    assert not forked_programs.will_fork(["python3", str(SCRIPT)], os.environ)
    assert not forked_programs.will_fork([sys.executable, "-c", "pass"], os.environ)
    assert not forked_programs.will_fork(command, {**os.environ, "PYTHONPATH": "/elsewhere"})
    (tmp_path / "models_of_mine.py").touch()
    assert forked_programs.will_fork(command, {**os.environ, "PYTHONPATH": str(tmp_path)})
    (tmp_path / "grpc").mkdir()
    assert not forked_programs.will_fork(command, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert json.loads(run("exit", "0", is_forked=True).stdout)["hash of a number"] == 7
    with pytest.warns(UserWarning, match=r"started and not forked, by other values of \['OMP_NUM_THREADS'\]"):
        other = run("exit", "0", is_forked=True, environment={**os.environ, "OMP_NUM_THREADS": "2"})
    assert json.loads(other.stdout)["environment"]["OMP_NUM_THREADS"] == "2"
    with forked_programs.as_started():
        assert not forked_programs.will_fork(command, os.environ)


def test_the_first_program_of_a_name_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_programs._forking, "started_once", set())
    assert forked_programs.Popen._is_first("up")
    assert not forked_programs.Popen._is_first("up")
    assert forked_programs.Popen._is_first("train")


def test_an_interrupt_reaches_programs_also_where_the_run_ignores_it() -> None:
    """As in the background of a script; what a test starts would inherit it."""
    conftest = Path(__file__).parents[1] / "conftest.py"
    code = "import runpy, signal, sys; runpy.run_path(sys.argv[1]); print(signal.getsignal(signal.SIGINT))"
    ignore = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", ignore, sys.executable, "-c", code, str(conftest)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "default_int_handler" in done.stdout
