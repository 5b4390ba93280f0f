"""Finds the packages of an optional part and the command that installs them, from the metadata of the package.

No package index has Sparserow, so the command names the packages that the part needs.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

_REQUIREMENT = re.compile(r"""([^;]+?)\s*(?:;\s*extra\s*==\s*["'](\w+)["'])?""")


def requirements(extra: str = "") -> list[str]:
    """Returns the packages that this package or an optional part of it needs, such as ``s3fs>=2026.6``.

    Args:
        extra: the name of the part in pyproject.toml, such as ``s3``; empty: what is needed without any.

    Returns:
        The requirements in the order of pyproject.toml; none where the program runs from a source tree that was not
        installed.
    """
    try:
        lines = requires("sparserow") or []
    except PackageNotFoundError:
        return []
    found = [match for line in lines if (match := _REQUIREMENT.fullmatch(line))]
    return [match[1] for match in found if (match[2] or "") == extra]


def install_command(extra: str) -> str:
    """Returns a shell command that installs an optional part, such as ``pip install 's3fs>=2026.6'``.

    Args:
        extra: the name of the part in pyproject.toml, such as ``s3``.
    """
    packages = [f"'{each}'" for each in requirements(extra)]
    return f"pip install {' '.join(packages)}" if packages else f"pip install '.[{extra}]' in sparserow's source tree"
