"""Finds the command that installs an optional part, from the metadata of the package.

No package index has Sparserow, so the command names the packages that the part needs.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

_OF_EXTRA = re.compile(r"""([^;]+?)\s*;\s*extra\s*==\s*["'](\w+)["']""")


def install_command(extra: str) -> str:
    """Returns a shell command that installs an optional part, such as ``pip install 's3fs>=2026.6'``.

    Args:
        extra: the name of the part in pyproject.toml, such as ``s3``.
    """
    try:
        lines = requires("sparserow") or []
    except PackageNotFoundError:  # the program runs from a source tree that was not installed
        lines = []
    found = [match for line in lines if (match := _OF_EXTRA.fullmatch(line))]
    packages = [f"'{match[1]}'" for match in found if match[2] == extra]
    return f"pip install {' '.join(packages)}" if packages else f"pip install '.[{extra}]' in sparserow's source tree"
