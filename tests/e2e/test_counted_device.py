"""Runs each file of ``tests/device`` in a process that knows the counted device from its beginning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted((TESTS / "device").glob("test_*.py"))
FULL = bool(os.environ.get("SPARSEROW_TEST_FULL"))
LONG = {"test_bench_gpu"}  # runs every part of the benchmark, for half a minute


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_on_a_counted_device(path: Path) -> None:
    if path.stem in LONG and not FULL:
        pytest.skip("a long form: SPARSEROW_TEST_FULL=1")
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(TESTS / "pytest.ini"), "--rootdir", str(TESTS)]
    done = subprocess.run(
        [*command, "-p", "no:xdist", str(path)],
        env={**os.environ, "SPARSEROW_COUNTED_DEVICE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
