"""A benchmark that is told to end leaves no folder and no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sparserow_process import runs, wait_until


@pytest.mark.parametrize("words", [("checkpoint",), ("all", "--only=checkpoint")], ids=lambda words: words[0])
def test_folders_and_processes_end_with_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "sparserow.deploy.cli", "bench", *words]
    run = subprocess.Popen(
        command,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    started: list[psutil.Process] = []
    try:
        wait_until(lambda: any(tmp_path.glob("sparserow-bench-*")), "the folder of the benchmark", 120)
        started = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGTERM)
        _, told = run.communicate(timeout=60)
        assert (run.returncode, told) == (130, "")
        assert list(tmp_path.iterdir()) == []
        wait_until(lambda: not any(map(runs, started)), "its processes to end", 60)
    finally:
        run.kill()
        for process in started:
            if runs(process):
                process.kill()
