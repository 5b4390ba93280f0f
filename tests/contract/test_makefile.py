"""The Makefile's recipes on machines that differ from the developers'."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("variable", ["PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"])
def test_processes_store_the_modules_that_they_compile(variable: str) -> None:
    """Packages come uncompiled, so each process would compile torch again where its work is not stored beside it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ("make", "--no-print-directory", "--eval=environment: ; @env", "environment")
    made = subprocess.run(
        command, cwd=ROOT, env=environment | {variable: "1"}, capture_output=True, text=True, timeout=60, check=True
    )
    names = {line.partition("=")[0] for line in made.stdout.splitlines()}
    assert "PATH" in names
    assert variable not in names
