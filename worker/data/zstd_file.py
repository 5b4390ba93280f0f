"""Inflates a zstd file while it is read, in order."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

from ...proto.errors import DataLoss

_SKIP_BYTES = 4 << 20


def open_zstd(source: BinaryIO, path: str) -> BinaryIO:
    """Returns a file of the inflated bytes, which is read forward; a seek back begins at the beginning again.

    Args:
        source: the compressed file, which is closed with the result.
        path: its path, for error texts.
    """
    return io.BufferedReader(_ZstdFile(source, path))


class _ZstdFile(io.RawIOBase):
    def __init__(self, source: BinaryIO, path: str) -> None:
        self._source, self._path = source, path
        self._begin()

    def _begin(self) -> None:
        import pyarrow as pa  # slow to import

        self._stream: Any = pa.CompressedInputStream(self._source, "zstd")
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        wanted = offset + (self._at if whence == io.SEEK_CUR else 0)
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the end of a compressed file is not known")
        if wanted < self._at:
            self._source.seek(0)
            self._begin()
        while self._at < wanted and self._read(min(wanted - self._at, _SKIP_BYTES)):
            pass
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()

    def _read(self, count: int) -> bytes:
        try:
            found: bytes = self._stream.read(count)
        except OSError as error:
            if "ZSTD" in str(error) or "compressed stream" in str(error):  # and no error of the storage
                raise DataLoss(f"{self._path}: the zstd file is damaged or cut short: {error}") from error
            raise
        self._at += len(found)
        return found
