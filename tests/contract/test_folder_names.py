"""What ``make test`` finds does not depend on the name of the folder that the project was cloned into."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rooms import MAY_IMPORT, ROOT


def _copied(folder: Path) -> None:
    """Copies what ruff reads: the settings and the Python files."""
    folder.mkdir()
    shutil.copy2(ROOT / "pyproject.toml", folder)
    for top in (*MAY_IMPORT, "tests"):
        shutil.copytree(
            ROOT / top,
            folder / top,
            ignore=lambda at, names: [
                name for name in names if not (name.endswith(".py") or Path(at, name).is_dir()) or name == "__pycache__"
            ],
        )
    for name in ("__init__.py", "setup.py"):
        shutil.copy2(ROOT / name, folder)


@pytest.mark.parametrize("name", ["sparserow", "elsewhere"])
def test_imports_are_in_order_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    """`git clone` calls the folder like the package, and ruff takes what is called like a folder for first-party."""
    _copied(tmp_path / name)
    ruff = Path(sys.executable).with_name("ruff")
    command = [ruff, "check", "--no-cache", "--select", "I", "--output-format", "concise", "."]
    done = subprocess.run(command, cwd=tmp_path / name, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
