"""Scripts that never close their session: how they leave their job."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparserow as sr
from sparserow.proto import control_pb2 as pb
from sparserow.proto.control import ControlClient

LEASE_SEC = 60.0  # a job that a test finds left was not left by the end of a lease

BEGIN = """
import multiprocessing, os, sys
import sparserow as sr, torch
def connect():
    return sr.connect(sys.argv[1], namespace="ads")
def staged(session):
    net = torch.nn.Sequential(torch.nn.Embedding(9, 2), torch.nn.Linear(2, 1))
    model = session.distribute(net, optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
    model(torch.tensor([1])).sum().backward()
    return model
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with sr.local_cluster(shards=1, worker_lease=LEASE_SEC) as cluster:
        yield cluster.address


def status(address: str) -> pb.GetStatusReply:
    with ControlClient(address) as control:
        return control.status()


def run(address: str, folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """A script of its own in an empty folder, which has left its job when it has ended."""
    script = folder / "script.py"
    script.write_text(f"{BEGIN}\n{body}")
    ended = subprocess.run(
        [sys.executable, str(script), address], cwd=folder, capture_output=True, text=True, check=False, timeout=180
    )
    assert not [job for job in status(address).jobs if job.members], ended.stderr
    return ended


@pytest.mark.parametrize(
    "body",
    [
        "session = connect()\n",
        "def main():\n    session = connect()\n    session.table\nmain()\n",
        "session = connect()\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\nsession.core.native.check_usable()\n"
        "from sparserow.proto.control import ControlClient\n"
        "assert [job for job in ControlClient(sys.argv[1]).status().jobs if job.members], 'the child left the job'\n",
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=connect)\n"
        "    child.start(); child.join(); sys.exit(child.exitcode)\n",
        "session = connect()\nsession.close()\n",
    ],
    ids=["module", "function", "beside-a-fork", "child-process", "closed"],
)
def test_a_script_that_ends_well_leaves_its_job(address: str, tmp_path: Path, body: str) -> None:
    before = len(status(address).faults)
    ended = run(address, tmp_path, body)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(status(address).faults) == before


@pytest.mark.parametrize("around", ["{}", "def main():\n    {}\nmain()"], ids=["module", "function"])
def test_an_uncaught_error_is_a_fault(address: str, tmp_path: Path, around: str) -> None:
    before = len(status(address).faults)
    ended = run(address, tmp_path, around.format("session = connect(); raise ValueError('a wrong column')"))
    assert ended.returncode == 1
    with ControlClient(address) as control:
        faults = control.list_faults()
    assert len(faults) == before + 1
    assert any("ValueError: a wrong column" in fault.message and "Traceback" in fault.traceback for fault in faults)


def test_an_uncaught_error_of_a_child_process_is_a_fault(address: str, tmp_path: Path) -> None:
    body = (
        "def fails():\n    session = connect()\n    raise ValueError('a wrong row')\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=fails)\n"
        "    child.start(); child.join(); sys.exit(child.exitcode)\n"
    )
    assert run(address, tmp_path, body).returncode == 1
    assert any("a wrong row" in fault.message for fault in status(address).faults)


def test_gradients_that_were_not_sent_are_dropped_with_a_warning(address: str, tmp_path: Path) -> None:
    before = len(status(address).faults)
    ended = run(address, tmp_path, "session = connect()\nmodel = staged(session)\n")
    assert ended.returncode == 0
    assert "the gradients of 1 calls of backward are lost" in ended.stderr
    assert len(status(address).faults) == before


WRONG_STEP = "model = staged(session)\ntorch.optim.SGD(model.parameters(), lr=0.1).step()\n"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (f"session = connect()\n{WRONG_STEP}", 120),
        (f"session = connect()\n{WRONG_STEP}import atexit; atexit.register(print, 'later')\nsys.exit(0)\n", 120),
        (f"session = connect()\n{WRONG_STEP}sys.stdout = None\n", 120),
        (f"session = connect()\n{WRONG_STEP}session.close()\n", 1),
        ("with connect() as session:\n" + "".join(f"    {line}\n" for line in WRONG_STEP.splitlines()), 1),
        (f"session = connect()\n{WRONG_STEP}raise KeyError('of its own')\n", 1),
    ],
    ids=["left-open", "exit-0", "no-output", "closed", "with", "an-error-of-its-own"],
)
def test_an_optimizer_that_stepped_in_place_of_the_session_is_an_exit_code(
    address: str, tmp_path: Path, body: str, code: int
) -> None:
    first = (
        "import atexit\ndef before():\n    print('an exit handler', flush=True)\n    print('of before')\n"
        "atexit.register(before)\n"
    )
    ended = run(address, tmp_path, first + body)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count("FailedPrecondition: SGD.step() moved the dense parameters") == ("KeyError" not in body)
    assert ("an exit handler\nof before\n" in ended.stdout) == ("stdout = None" not in body)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_is_one_of_a_child_process_too(address: str, tmp_path: Path, method: str) -> None:
    body = (
        "def child():\n    session = connect()\n"
        + "".join(f"    {line}\n" for line in WRONG_STEP.splitlines())
        + "if __name__ == '__main__':\n"
        f"    process = multiprocessing.get_context('{method}').Process(target=child)\n"
        "    process.start(); process.join(); sys.exit(process.exitcode)\n"
    )
    ended = run(address, tmp_path, body)
    assert ended.returncode not in (0, None), ended.stderr
    assert "SGD.step() moved the dense parameters" in ended.stderr


def test_an_optimizer_that_stepped_in_place_of_the_session_is_a_fault(address: str, tmp_path: Path) -> None:
    run(address, tmp_path, f"session = connect()\n{WRONG_STEP}")
    assert any("SGD.step() moved the dense parameters" in fault.message for fault in status(address).faults)


def test_the_end_of_the_process_raises() -> None:
    script = """
import sparserow as sr, torch
session = sr.InProcessCluster().connect("lone")
model = session.distribute(torch.nn.Sequential(torch.nn.Embedding(9, 2), torch.nn.Linear(2, 1)),
                      optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
model(torch.tensor([1])).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert "FailedPrecondition: SGD.step() moved the dense parameters" in ended.stderr


def test_a_coordinator_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{BEGIN}\nsession = connect()\nprint('connected', flush=True)\nsys.stdin.read()\n")
    with sr.local_cluster(shards=1) as cluster:
        process = subprocess.Popen(
            [sys.executable, str(script), cluster.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
    began = time.monotonic()
    _, errors = process.communicate("", timeout=120)
    assert process.returncode == 0, errors
    assert time.monotonic() - began < 30
    assert "leaving the job" in errors
