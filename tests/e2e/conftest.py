"""Fixtures of the tests that build and install the package."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest


@pytest.fixture
def empty_environment(tmp_path: Path) -> Path:
    """The interpreter of a fresh environment that sees our dependencies but not our editable install.

    A path in a ``.pth`` file adds the folder without running the ``.pth`` files inside, so the editable install of the
    checkout under test stays out of sight.
    """
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout.strip()
    (Path(where) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    seen = subprocess.run(
        [python, "-c", "import sparserow"],
        capture_output=True,
        cwd=tmp_path,
        timeout=300,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert seen.returncode != 0, f"the fresh environment of {sys.executable} already has sparserow"
    return python
