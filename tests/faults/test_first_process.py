"""A job that is process 1, as in a container, where the kernel drops signals that a process has no handler for."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from sparserow.worker.data import write_click_log
from sparserow_process import Launcher, wait_until

pytestmark = pytest.mark.started

FIRST = ("unshare", "--pid", "--fork", "--mount-proc")
JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"


@pytest.fixture(autouse=True)
def spaces_of_processes() -> None:
    tried = subprocess.run([*FIRST, "true"], capture_output=True, text=True, timeout=60)
    if tried.returncode:
        pytest.skip(f"no namespace of processes can be made: {tried.stderr.strip()}")


def test_sigterm_ends_it_with_all_that_it_started(launcher: Launcher, tmp_path: Path) -> None:
    log = write_click_log(tmp_path, rows=2_000, test_rows=500, seed=3)
    sets = (
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.args.rows={'*': 1000}",
        "model.min_rows=1",
        "train.epochs=1000",
    )
    sets = (*sets, "train.workers=2", "train.threads=1", "train.batch_size=256")
    assigned = [word for each in sets for word in ("--set", each)]
    run = launcher.start("train", str(JOBS / "demo.yaml"), *assigned, within=FIRST)
    run.wait_for("epoch 2/1000")
    (first,) = psutil.Process(run.popen.pid).children()
    first.send_signal(signal.SIGTERM)
    assert run.end() == 130
    wait_until(lambda: not launcher.living(), "no process is left")
