"""The checkout as a package elsewhere: its tracked files, or links to all of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rooms import ROOT


def tracked_files() -> list[str]:
    """What git tracks and is there, as paths below the checkout; skips the test outside of a checkout of git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=300)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).exists()]


def link_package(packages: Path, left_out: str = "") -> Path:
    """Makes ``packages/sparserow`` of links to the checkout; returns its folder of the core.

    Args:
        packages: a folder that Python is to import from.
        left_out: what the names of files begin with that are left out; empty: none.
    """
    core = packages / "sparserow" / "cpp_ext"
    core.mkdir(parents=True)
    for of, to in ((ROOT, core.parent), (ROOT / "cpp_ext", core)):
        for each in of.iterdir():
            if each.name not in ("cpp_ext", "build", ".venv") and not (left_out and each.name.startswith(left_out)):
                (to / each.name).symlink_to(each)
    return core
