"""Writes a local file once; the file is on the disk when the call returns.

Large files bypass the page cache where the file system allows it (O_DIRECT), because a save is not read again soon.
Copying it into new pages, which the system then writes, took more CPU time than the rest of a save.
It also evicted pages that readers of other files use.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_BLOCK = 4096  # bytes; lengths and offsets of direct writes are multiples of it
_PIECE_BYTES = 1 << 20  # bytes of one write
_LEAST_DIRECT_BYTES = 4 << 20


def write_file(path: str, pieces: Sequence[Bytes]) -> None:
    """Writes a file and syncs it; after a failure the file is removed.

    Args:
        path: the path of the file.
        pieces: the contents, (n) uint8 each, written one after another.

    Raises:
        OSError: the system refused a write.
    """
    try:
        if sum(len(piece) for piece in pieces) < _LEAST_DIRECT_BYTES or not _write_direct(path, pieces):
            _write_cached(path, pieces)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise


def _write_cached(path: str, pieces: Sequence[Bytes]) -> None:
    with open(path, "wb", buffering=0) as file:
        for piece in pieces:
            _write_all(file.fileno(), piece.data)
        os.fdatasync(file.fileno())


def _write_direct(path: str, pieces: Sequence[Bytes]) -> bool:
    """Writes a file with O_DIRECT; returns False when the file system does not support it, and the file is to be
    written anew.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    try:
        for filled in _in_blocks(pieces):
            try:
                _write_all(descriptor, filled)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return False
                raise
        os.ftruncate(descriptor, sum(len(piece) for piece in pieces))
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    return True


def _in_blocks(pieces: Sequence[Bytes]) -> Iterator[memoryview]:
    """Yields all bytes as whole blocks in page-aligned memory; the last block is padded with zeros."""
    buffer, filled = np.frombuffer(mmap.mmap(-1, _PIECE_BYTES), np.uint8), 0
    for piece in pieces:
        taken = 0
        while taken < len(piece):
            count = min(len(piece) - taken, _PIECE_BYTES - filled)
            buffer[filled : filled + count] = piece[taken : taken + count]
            taken, filled = taken + count, filled + count
            if filled == _PIECE_BYTES:
                yield buffer.data
                filled = 0
    if filled:
        end = -(-filled // _BLOCK) * _BLOCK
        buffer[filled:end] = 0
        yield buffer[:end].data


def _write_all(descriptor: int, rest: memoryview) -> None:
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Returns when the names of a local folder's files are on the disk.

    Raises:
        OSError: the folder cannot be opened or written.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
