"""Finds and opens files of training data, by path or by URL (fsspec)."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from ...proto.checkpoint.folder import file_system_of, typed
from ...proto.errors import NotFound, SparserowError

_HTTP_TAGS = ("ETag", "Content-MD5", "Digest")  # which fsspec keeps of a reply
_SETTLED_SEC = 2.0  # the coarsest clock of a file system, that of FAT


def is_url(path: str) -> bool:
    """Returns whether a path is a URL, which fsspec opens."""
    return "://" in path


def find_paths(patterns: Sequence[str], setting: str) -> tuple[str, ...]:
    """Returns the files that paths, folders and patterns name.

    Patterns are expanded in sorted order; ``**`` matches any number of folders. A folder stands for all files below it,
    in sorted order, but for names that begin with a dot or an underscore, at any depth.

    Args:
        patterns: paths or URLs of files or folders, or patterns of them.
        setting: the key that has them, for error texts.

    Raises:
        NotFound: a path, folder or pattern names no file.
        InvalidArgument: the scheme of a URL is unknown, or its package is not installed.
        FailedPrecondition: the storage refuses.
    """
    found: list[str] = []
    for pattern in patterns:
        if not is_url(pattern) and not glob.has_magic(pattern) and not os.path.exists(pattern):
            raise NotFound(f"{setting}: {pattern}: No such file or directory")
        paths = _found_by_url(pattern) if is_url(pattern) else _found_here(pattern)
        if not paths:
            raise NotFound(f"{setting}: {pattern}: no file has such a name")
        found.extend(paths)
    return tuple(found)


def _found_here(pattern: str) -> list[str]:
    names = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
    found: list[str] = []
    for name in names:
        if not os.path.isdir(name):
            found.append(name)
            continue
        below = [os.path.join(folder, file) for folder, _, files in os.walk(name) for file in files]
        found.extend(sorted(path for path in below if _is_data(os.path.relpath(path, name))))
    return list(dict.fromkeys(found))  # as ** matches folders and what is in them


def _found_by_url(pattern: str) -> list[str]:
    file_system, path = file_system_of(pattern)
    with typed(pattern):
        file_system.invalidate_cache()
        names = sorted(file_system.glob(path)) if glob.has_magic(path) else [path]
        found: list[str] = []
        for name in names:
            if not file_system.isdir(name):
                found.append(name)
                continue
            root = str(name).rstrip("/")
            below = sorted(str(each) for each in file_system.find(root))
            found.extend(each for each in below if _is_data(each[len(root) :].lstrip("/")))
    return [str(file_system.unstrip_protocol(name)) for name in dict.fromkeys(found)]


def _is_data(path: str) -> bool:
    return not any(part.startswith((".", "_")) for part in PurePosixPath(path).parts)


def open_bytes(path: str) -> BinaryIO:
    """Opens a file for reading, by path or URL.

    Raises:
        NotFound: there is no such file, or it cannot be read.
        InvalidArgument: the scheme of the URL is unknown, or its package is not installed.
        FailedPrecondition: the storage refuses.
    """
    if not is_url(path):
        try:
            return open(path, "rb")
        except OSError as error:
            raise NotFound(f"{path}: {error.strerror or error}") from error
    file_system, name = file_system_of(path)
    with typed(path):
        opened: BinaryIO = file_system.open(name, "rb")
        return opened


def read_range(path: str, begin: int, count: int) -> bytes:
    """Returns ``count`` bytes of a file from ``begin`` on, or fewer at its end.

    Raises:
        NotFound, InvalidArgument, FailedPrecondition: as for :func:`open_bytes`.
    """
    if is_url(path):
        file_system, name = file_system_of(path)
        with typed(path):
            return bytes(file_system.cat_file(name, start=begin, end=begin + count))
    with open_bytes(path) as source:
        try:
            source.seek(begin)
            return source.read(count)
        except OSError as error:
            raise NotFound(f"{path}: {error.strerror or error}") from error


def arrow_file_system(path: str) -> tuple[Any, str]:
    """Returns the Arrow file system of a file, and the file's path in it.

    Raises:
        InvalidArgument: the scheme of the URL is unknown, or its package is not installed.
    """
    from pyarrow import fs  # slow to import

    if not is_url(path):
        return fs.LocalFileSystem(), os.path.abspath(path)
    file_system, name = file_system_of(path)
    return fs.PyFileSystem(fs.FSSpecHandler(file_system)), name


def identity_of(path: str) -> str:
    """Returns a text that differs after a file was written anew: its size and time, or what its storage says of it.

    Returns "" where nothing shows whether a file is the same: it was written within the last seconds, whose times a
    later write may share, or it cannot be looked at.
    """
    try:
        if is_url(path):
            file_system, name = file_system_of(path)
            with typed(path):
                if not path.startswith(("http://", "https://")):
                    return str(file_system.ukey(name))
                # The key of an address is the address. A server may say nothing of the contents.
                info = file_system.info(name)
                tag = next((str(info[each]) for each in _HTTP_TAGS if info.get(each)), "")
                return tag and f"{info.get('size')} {tag}"
        found = os.stat(path)
    except (OSError, NotImplementedError, SparserowError):
        return ""
    if time.time() - found.st_mtime < _SETTLED_SEC:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"
