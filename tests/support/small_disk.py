"""A file system that is really full soon: a tmpfs of a few MiB."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_disk(folder: Path, mebibytes: int = 64, otherwise: str = "", kind: str = "tmpfs") -> Iterator[Path]:
    """Mounts it at ``folder``, which is made; a ``ramfs`` has no bound and no direct I/O. Where that is not allowed the
    test is skipped, and ``otherwise`` says what is tested elsewhere.
    """
    folder.mkdir()
    mount = ["mount", "-t", kind, "-o", f"size={mebibytes}m", "sparserow-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a file system" + otherwise)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
