"""Prints what servers need of Python: the package's dependencies but torch, one a line. For deploy/Dockerfile."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def server_requirements(project: dict[str, Any]) -> list[str]:
    """Dependencies of a pyproject document's ``project``, without torch."""
    needed: list[str] = project["project"]["dependencies"]
    return [each for each in needed if not each.startswith("torch")]


def main() -> None:
    """Reads the pyproject.toml beside this folder."""
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    print("\n".join(server_requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()))))


if __name__ == "__main__":
    main()
