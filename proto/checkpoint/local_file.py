"""Writes a local file once; the file is on the disk when the call returns, and its checksum is known.

Each block is hashed while it is in the CPU's cache, right before it is written.

Large files bypass the page cache where the file system allows it (O_DIRECT), because a save is not read again soon.
Copying it into new pages, which the system then writes, took more CPU time than the rest of a save.
It also evicted pages that readers of other files use.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_BLOCK = 4096  # bytes; lengths and offsets of direct writes are multiples of it
_PIECE_BYTES = 1 << 20  # bytes of one write
_LEAST_DIRECT_BYTES = 4 << 20
_HUGE_BYTES = 2 << 20
_of_thread = threading.local()


class Pace(Protocol):
    """The pace of a thread that gives way to others (``_server.SavePace``)."""

    def begin(self) -> None:
        """What the thread does from now on, up to ``pause``, counts as computing."""

    def pause(self) -> None:
        """Pauses where the thread takes CPUs from others."""


def write_file(path: str, pieces: Sequence[Bytes], pace: Pace | None = None) -> str:
    """Writes a file and syncs it; after a failure the file is removed.

    Args:
        path: the path of the file.
        pieces: the contents, (n) uint8 each, written one after another.
        pace: slows the copying and hashing; None: nothing does.

    Returns:
        The XXH3-64 of the contents, in hexadecimal digits.

    Raises:
        OSError: the system refused a write.
    """
    try:
        digest = None
        if sum(len(piece) for piece in pieces) >= _LEAST_DIRECT_BYTES:
            digest = _write_direct(path, pieces, pace)
        return digest or _write_cached(path, pieces)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise


def hash_pieces(pieces: Sequence[Bytes], pace: Pace | None = None) -> str:
    """Returns the XXH3-64 of pieces one after another, (n) uint8 each, in hexadecimal digits."""
    digest = xxhash.xxh3_64()
    if pace is not None:
        pace.begin()
    for piece in pieces:
        for begin in range(0, len(piece), _PIECE_BYTES):
            digest.update(piece[begin : begin + _PIECE_BYTES].data)
            if pace is not None:
                pace.pause()
    return digest.hexdigest()


def _write_cached(path: str, pieces: Sequence[Bytes]) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "wb", buffering=0) as file:
        for piece in pieces:
            for begin in range(0, len(piece), _PIECE_BYTES):
                block = piece[begin : begin + _PIECE_BYTES].data
                digest.update(block)
                _write_all(file.fileno(), block)
        os.fdatasync(file.fileno())
    return digest.hexdigest()


def _write_direct(path: str, pieces: Sequence[Bytes], pace: Pace | None) -> str | None:
    """Writes a file with O_DIRECT; returns None when the file system does not support it, and the file is to be
    written anew.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    digest, size, done = xxhash.xxh3_64(), sum(len(piece) for piece in pieces), 0
    try:
        if pace is not None:
            pace.begin()
        for filled in _in_blocks(pieces):
            digest.update(filled[: size - done])  # without the padding of the last block
            done += len(filled)
            if pace is not None:
                pace.pause()
            try:
                _write_all(descriptor, filled)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return None
                raise
            if pace is not None:
                pace.begin()  # the disk's time is no computing
        os.ftruncate(descriptor, size)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _in_blocks(pieces: Sequence[Bytes]) -> Iterator[memoryview]:
    """Yields all bytes as whole blocks in page-aligned memory; the last block is padded with zeros."""
    buffer, filled = _block_memory(), 0
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


def _block_memory() -> Bytes:
    """Returns this thread's memory for a block, which is aligned to pages and used for file after file."""
    memory: Bytes | None = getattr(_of_thread, "block", None)
    if memory is None:
        mapped = mmap.mmap(-1, _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                mapped.madvise(mmap.MADV_HUGEPAGE)  # the system pins one page for each write, not hundreds
        memory = _of_thread.block = np.frombuffer(mapped, np.uint8)[:_PIECE_BYTES]
    return memory


def _write_all(descriptor: int, rest: memoryview) -> None:
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def create_file(path: str, data: bytes) -> None:
    """Writes a small file that must not exist. A call that fails leaves none.

    Raises:
        OSError: there is such a file, or it cannot be written.
    """
    with open(path, "xb", buffering=0) as file:
        try:
            _write_all(file.fileno(), memoryview(data))
        except BaseException:
            os.unlink(path)
            raise


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
