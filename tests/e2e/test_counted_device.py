"""Runs the files of ``tests/device`` in a process that knows the counted device from its beginning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from long_form import FULL

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted((TESTS / "device").glob("test_*.py"))
LONG = {"test_bench_gpu"}  # runs every part of the benchmark, for half a minute


@pytest.mark.timeout(1200)
def test_on_a_counted_device() -> None:
    paths = [str(path) for path in FILES if FULL or path.stem not in LONG]
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(TESTS / "pytest.ini"), "--rootdir", str(TESTS)]
    done = subprocess.run(
        [*command, "-p", "no:xdist", *paths],
        env={**os.environ, "SPARSEROW_COUNTED_DEVICE": "1"},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 60
