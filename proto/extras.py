"""What installs the packages of an optional part, from the package's own metadata.

Sparserow is on no index, so ``pip install`` takes the packages themselves.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

_OF_EXTRA = re.compile(r"""([^;]+?)\s*;\s*extra\s*==\s*["'](\w+)["']""")


def install_command(extra: str) -> str:
    """The command of a shell, such as ``pip install 's3fs>=2026.6'``; ``extra`` is a part that pyproject.toml names."""
    try:
        lines = requires("sparserow") or []
    except PackageNotFoundError:  # a tree that was not installed
        lines = []
    found = [match for line in lines if (match := _OF_EXTRA.fullmatch(line))]
    packages = [f"'{match[1]}'" for match in found if match[2] == extra]
    return f"pip install {' '.join(packages)}" if packages else f"pip install '.[{extra}]' in sparserow's source tree"
