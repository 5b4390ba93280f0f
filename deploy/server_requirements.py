"""Prints the Python packages that servers need, one a line, for deploy/Dockerfile.

torch and pyarrow are left out, because they are larger than all the rest: servers run without them. Of what servers do,
lookups by values alone need pyarrow.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OF_WORKERS = ("torch", "pyarrow")


def server_requirements(project: dict[str, Any]) -> list[str]:
    """Returns the dependencies in a pyproject document, without those of workers."""
    needed: list[str] = project["project"]["dependencies"]
    return [each for each in needed if re.split(r"[^\w.-]", each)[0] not in OF_WORKERS]


def main() -> None:
    """Prints the requirements in the pyproject.toml of the folder above this one."""
    print("\n".join(server_requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()))))


if __name__ == "__main__":
    main()
