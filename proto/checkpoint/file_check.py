"""Reads files whole and compares each with its entry in a manifest.

A process with the native server reads a local file by blocks into memory that it uses again, and hashes each block
while it is in the CPU's cache. Any other file is mapped or fetched, and hashed in a pass of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import DataLoss, NotFound
from .entries import FileFacts
from .folder import Folder

_MOST_BLOCK_READ_BYTES = 96 << 20  # a larger file is mapped, because each thread has the memory of one file


class BlockReader(Protocol):
    """The native reader of local files (``_server.FileReader``)."""

    def read(self, path: str, size: int) -> tuple[NDArray[np.uint8], int, int]:
        """Returns the first ``size`` bytes of a file, the size of the file, and the XXH3-64 of the bytes."""


def read_checked(folder: Folder, facts: FileFacts, damage: str, reader: BlockReader | None = None) -> memoryview:
    """Returns the bytes of a file, after comparing its size and checksum with its entry in a manifest.

    Args:
        folder: the folder of the file.
        facts: the entry in the manifest.
        damage: the text of the error when the checksums differ.
        reader: reads local files of at most 96 MiB; None: they are mapped.

    Raises:
        NotFound: there is no such file.
        DataLoss: the size or the checksum differs; the text names the file.
        FailedPrecondition, ResourceExhausted: the file cannot be read; the text names it.
    """
    where = f"{folder.url}/{facts.file}"
    if reader is None or not folder.is_local or facts.bytes > _MOST_BLOCK_READ_BYTES:
        folder.read_ahead(facts.file)
        data = folder.read(facts.file)
        size, digest = len(data), ""
    else:
        path = folder.path_of(facts.file)
        try:
            block_read, size, number = reader.read(path, facts.bytes)
        except NotFound:
            raise NotFound(f"{where}: no such file or folder") from None
        data, digest = _view_of(block_read), f"{number:016x}"
    if size != facts.bytes:
        raise DataLoss(f"{where}: the file has {size} bytes; its manifest says {facts.bytes}")
    if (digest or xxhash.xxh3_64_hexdigest(data)) != facts.xxh3:
        raise DataLoss(f"{where}: {damage}")
    return data


def _view_of(values: NDArray[Any]) -> memoryview:
    return memoryview(values.data)
