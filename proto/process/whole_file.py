"""Writes a file so that a reader finds all of it or the one before."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ResourceExhausted


def write_whole(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Writes ``text`` as UTF-8 to a file beside ``path``, and renames that once it is on disk.

    A link is followed. What is no regular file, such as ``/dev/stdout``, is written as it is.

    Args:
        path: the file; its folder exists.
        text: the whole content.
        mode: the permissions of the file, before the umask.

    Raises:
        ResourceExhausted: the file cannot be written, for example because the disk is full; one that was there stays.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        whole = path.resolve()
        part = whole.with_name(f".{whole.name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(whole)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceExhausted(f"{path}: the file cannot be written: {error.strerror}") from error
