"""Serving and coordinator go to the next version while training goes on, and shards by save and restore.

The next version is this tree with the number of each format raised, compiled anew; it reads what this one writes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from checkout import tracked_files
from restart_scene import DIM, ROWS, Scene, Trained, facts, status_of
from rooms import ROOT
from sparserow_process import Launcher, Process, free_port, wait_until

pytestmark = [pytest.mark.started, pytest.mark.full("test_fixtures.py reads the formats of this version")]

KEYS = np.arange(ROWS, dtype=np.uint64)
# File, and its line with the number that is written and, where there is one, the oldest that is read.
RAISED = {
    "cpp_ext/rpc/wire/frame.h": r"kProtocolVersion = (\d+);",
    "cpp_ext/store/changes/change_page_format.h": r"kPageFormat = (\d+);",
    "proto/shard_protocol.py": r"SHARD_PROTOCOL = (\d+)",
    "proto/checkpoint/manifest_format.py": r"FORMAT, OLDEST_FORMAT = (\d+), ",
    "proto/published/manifest.py": r"FORMAT, OLDEST_FORMAT = (\d+), ",
    "proto/features/document.py": r"FORMAT, OLDEST_FORMAT = (\d+), ",
    "ps_server/coordinator/state/cluster.py": r"FORMAT, OLDEST_FORMAT = (\d+), ",
}
PULL = """
import sys, numpy as np, sparserow as sr

assert sr.__file__.startswith(sys.argv[1]), sr.__file__
with sr.connect(sys.argv[2], "restart", job="later", staleness=None) as session:
    rows = session.table("rows0").pull(np.arange(300, dtype=np.uint64))
    session.create_table("of_later", dim=4, optimizer=sr.optim.SGD(lr=1.0)).push([1], np.ones((1, 4), np.float32))
np.save(sys.argv[3], rows)
"""


@pytest.fixture(scope="module")
def next_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that has the next version as the package ``sparserow``."""
    folder = tmp_path_factory.mktemp("next")
    tree = folder / "sparserow"
    for name in tracked_files():
        if not name.startswith(("tests/", "docs/")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    for name, pattern in RAISED.items():
        text = (tree / name).read_text()
        ((whole, number),) = [(match[0], match[1]) for match in re.finditer(pattern, text)]
        (tree / name).write_text(text.replace(whole, whole.replace(number, str(int(number) + 1), 1)))
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True, timeout=1800)
    return folder


class Served:
    """A serving process at a fixed port, which follows the training."""

    def __init__(self, root: Path, coordinator: str) -> None:
        self.port = free_port()
        self._options = (f"--root={root}", "--model=ctr", f"--port={self.port}", "--poll=50ms",
                         f"--follow={coordinator}")  # fmt: skip

    def start(self, launcher: Launcher) -> Process:
        """Starts it and waits until it is ready."""
        process = launcher.start("serve", *self._options)
        process.wait_for(r"ready at gRPC ")
        return process

    def row(self) -> float:
        """A number of the first row, which is the number of steps that it has seen, negated."""
        with sr.ServingClient(f"127.0.0.1:{self.port}") as client:
            return float(client.lookup("rows0", KEYS[:1], deadline_ms=20_000).rows[0, 0])


def test_serving_and_coordinator_are_upgraded_under_training(
    launcher: Launcher, tmp_path: Path, next_version: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "later").mkdir()
    later = Launcher(tmp_path / "later")
    later.environment["PYTHONPATH"] = str(next_version)
    away = {}
    try:
        scene = Scene(launcher, tmp_path)
        trained = Trained(scene.address, 2)
        trained.go_on(5)
        with sr.connect(scene.address, "restart", job="publisher", staleness=None) as session:
            session.publish("ctr", root=str(tmp_path / "models"))
        served = Served(tmp_path / "models", scene.address)
        first = served.start(launcher)
        assert served.row() <= -5

        began = time.monotonic()
        first.popen.terminate()
        first.end()
        served.start(later)
        away["serving"] = time.monotonic() - began
        done = trained.steps[0]
        wait_until(lambda: served.row() <= -done, "the later process to serve what is trained now")

        before = facts(scene.address)
        began = time.monotonic()
        scene.process.popen.terminate()
        scene.process.end()
        scene.launcher = later
        scene.start()
        wait_until(scene.is_ready, "the shards to come back")
        away["coordinator"] = time.monotonic() - began
        trained.go_on(20)
        assert facts(scene.address) == before
        done = trained.steps[0]
        wait_until(lambda: served.row() <= -done, "pages of shards whose coordinator is later")

        pulled = tmp_path / "pulled.npy"
        script = [sys.executable, "-c", PULL, str(next_version), scene.address, str(pulled)]
        subprocess.run(script, env=later.environment, check=True, timeout=120, cwd=tmp_path)
        assert np.load(pulled).max() <= -done

        trained.end()
        saved = str(tmp_path / "saved")
        with sr.connect(scene.address, "restart", job="saver", staleness=None) as session:
            session.save(saved)
        (manifest,) = Path(saved).glob("*/manifest.json")
        assert json.loads(manifest.read_text())["checkpoint"]["format"] == 2
        for each in (scene.process, *scene.shards):
            each.popen.terminate()
            each.end()

        (tmp_path / "again").mkdir()
        again = Scene(later, tmp_path / "again")
        restoring = later.start("checkpoint", "restore", saved, f"--coordinator={again.address}", "--yes")
        assert restoring.end() == 0, restoring.err
        with sr.connect(again.address, "restart", job="reader", staleness=None) as session:  # of this version
            for rank, steps in enumerate(trained.steps):
                rows = session.table(f"rows{rank}").pull(KEYS)
                np.testing.assert_array_equal(rows, np.full((ROWS, DIM), -steps, np.float32))
            session.table("rows0").push(KEYS, np.ones((ROWS, DIM), np.float32))
            rows = session.table("rows0").pull(KEYS)
            np.testing.assert_array_equal(rows, np.full((ROWS, DIM), -trained.steps[0] - 1, np.float32))
        assert len(status_of(again.address).shards) == 2
    finally:
        later.kill_all()
    with capsys.disabled():
        print("\naway:", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in away.items()))


def test_a_state_of_the_next_version_is_refused(launcher: Launcher, tmp_path: Path, next_version: Path) -> None:
    later = Launcher(tmp_path)
    later.environment["PYTHONPATH"] = str(next_version)
    options = ("--shards=1", "--port=0", f"--state={tmp_path / 'state.json'}")
    try:
        process = later.start("coordinator", *options)
        process.wait_for(r"coordinator at (\S+:\d+)")
        process.popen.terminate()
        process.end()
    finally:
        later.kill_all()
    assert "the state has format 7; this program reads format 6" in launcher.start("coordinator", *options).error_line()
