"""Runs the programs of this environment, for what is made of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def output(*command: str | Path, check: bool = True) -> str:
    """Runs a command, with the programs of this environment first, and returns what it prints.

    Raises:
        SystemExit: the command fails, and ``check`` is set.
    """
    where = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env={**os.environ, "PATH": where}, capture_output=True, text=True
    )
    if check and done.returncode != 0:
        raise SystemExit(f"{done.stdout}{done.stderr}sparserow: {' '.join(map(str, command[:4]))} failed")
    return done.stdout


def project_version() -> str:
    """Returns the version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def only(folder: Path, pattern: str) -> Path:
    """Returns the one file or folder of ``folder`` that matches."""
    (found,) = folder.glob(pattern)
    return found
