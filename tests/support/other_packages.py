"""Environments with other versions of some packages than the tests have; all else is that of the tests."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from rooms import ROOT


class OtherPackages:
    """A virtual environment whose own packages go before those of this one.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "environment")
        self._folder = folder
        self.python = folder / "environment" / "bin" / "python"
        (packages,) = site.getsitepackages()
        (own,) = folder.glob("environment/lib/python*/site-packages")
        (own / "zz_more.pth").write_text(f"import site; site.addsitedir({packages!r})\n")

    def run(self, *arguments: str | Path, path: Path | None = None) -> str:
        """Runs Python and returns what it prints; ``path`` goes before all packages."""
        done = subprocess.run(
            [self.python, *arguments],
            env={
                **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                "PATH": os.pathsep.join([str(self.python.parent), os.environ["PATH"]]),
                **({"PYTHONPATH": str(path)} if path else {}),
            },
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=3600,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        return done.stdout

    def run_tests(self, tests: Sequence[str], path: Path | None = None) -> None:
        """Runs folders of tests; fails with what they print."""
        options = ("-c", ROOT / "tests" / "pytest.ini", "--rootdir", ROOT / "tests", "-q", "-p", "no:xdist")
        self.run(
            "-m", "pytest", *options, "-p", "no:cacheprovider", *(ROOT / "tests" / each for each in tests), path=path
        )


def pip(environment: OtherPackages, *arguments: str | Path) -> None:
    """Runs this environment's pip for another one."""
    command = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", environment.python)
    subprocess.run([*command, *arguments], check=True, timeout=1800)
