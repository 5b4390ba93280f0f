"""Prints the Python packages that servers need, one a line, for deploy/Dockerfile: all dependencies but torch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def server_requirements(project: dict[str, Any]) -> list[str]:
    """Returns the dependencies in a pyproject document, without torch."""
    needed: list[str] = project["project"]["dependencies"]
    return [each for each in needed if not each.startswith("torch")]


def main() -> None:
    """Prints the requirements in the pyproject.toml of the folder above this one."""
    print("\n".join(server_requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()))))


if __name__ == "__main__":
    main()
