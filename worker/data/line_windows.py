"""Reads text files in runs of whole lines with their positions; a file is never in memory as a whole.

A file whose name ends in ``.gz`` or ``.zst`` is inflated while it is read. A byte order mark before the first line is
left out.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ...proto.errors import DataLoss, InvalidArgument, NotFound
from .storage import open_bytes
from .zstd_file import open_zstd

_BLOCK_BYTES = 4 << 20
_MAX_LINE_BYTES = 1 << 20
_LOOKED_AT = 4096  # bytes at the beginning of a file that are searched for zero bytes, which no text has
_MAGICS = {
    b"PAR1": "Parquet",
    b"ORC": "ORC",
    b"ARROW1": "Arrow",
    b"\x93NUMPY": "NumPy",
    b"SQLite format 3": "SQLite",
    b"\x89HDF": "HDF5",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "LZ4",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
_NEWLINE = 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some programs write it in front of a UTF-8 text; no field has it


@dataclass(frozen=True)
class LinePosition:
    """The position of a line in a file.

    Attributes:
        offset: the byte offset, after inflation.
        line: the line number, from 1.
    """

    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class LineWindow:
    """A run of whole lines.

    Attributes:
        path: the path of the file.
        place: the position of the first line.
        text: the lines; the last line of a file may lack its newline.
        lines: the number of lines.
    """

    path: str
    place: LinePosition
    text: bytes
    lines: int

    @property
    def end(self) -> LinePosition:
        """The position at which the next window begins."""
        return LinePosition(self.place.offset + len(self.text), self.place.line + self.lines)

    def span(self, part: int, parts: int) -> LineWindow:
        """Returns one of the runs of lines into which the window is cut.

        Args:
            part: the number of the run, in [0, parts).
            parts: the number of runs; their numbers of lines differ by at most 1.
        """
        return self._run(self.lines * part // parts, self.lines * (part + 1) // parts, _line_ends(self.text))

    def pieces(self, lines_per_piece: int) -> Iterator[LineWindow]:
        """Returns the window in runs of about ``lines_per_piece`` lines."""
        parts = max(1, -(-self.lines // lines_per_piece))
        ends = _line_ends(self.text)
        return (self._run(self.lines * part // parts, self.lines * (part + 1) // parts, ends) for part in range(parts))

    def _run(self, first: int, last: int, ends: npt.NDArray[np.int64]) -> LineWindow:
        """Returns the lines [first, last); ``ends`` is where each line of the window ends, (lines) int64."""
        begin = 0 if first == 0 else int(ends[first - 1])
        end = len(self.text) if last == self.lines else (0 if last == 0 else int(ends[last - 1]))
        place = LinePosition(self.place.offset + begin, self.place.line + first)
        return LineWindow(self.path, place, self.text[begin:end], last - first)


def is_compressed(path: str) -> bool:
    """Returns whether a file is inflated while it is read."""
    return path.endswith((".gz", ".zst"))


def open_text(path: str) -> BinaryIO:
    """Opens a plain, gzip or zstd file for reading bytes, by path or URL.

    Raises:
        NotFound: there is no such file, or it cannot be read.
    """
    source = open_bytes(path)
    if path.endswith(".zst"):
        return open_zstd(source, path)
    return gzip.GzipFile(fileobj=source) if is_compressed(path) else source  # type: ignore[return-value]


def read_bytes(source: BinaryIO, path: str, count: int) -> bytes:
    """Reads up to ``count`` bytes of a file from :func:`open_text`.

    Raises:
        NotFound, DataLoss: the file cannot be read.
    """
    try:
        return source.read(count)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataLoss(f"{path}: the gzip file is damaged or cut short: {error}") from error
    except DataLoss:
        raise
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror or error}") from error


def first_line(path: str, comment: str = "") -> bytes:
    """Returns the first line that is not a comment, without its line end.

    It returns an empty line when the first 4 MiB of the file have no such line.

    Args:
        path: the path of the file.
        comment: the text with which a comment line begins; "": there are no comments.

    Raises:
        NotFound, DataLoss: the file cannot be read.
        InvalidArgument: a line before it is longer than 1 MiB, or the file is not text.
    """
    with open_text(path) as source:
        block = read_bytes(source, path, _BLOCK_BYTES)
    check_text(path, block)
    for number, line in enumerate(block.removeprefix(_BYTE_ORDER_MARK).split(b"\n"), start=1):
        if len(line) > _MAX_LINE_BYTES:
            raise _too_long(path, number)
        if not (comment and line.startswith(comment.encode())):
            return line.rstrip(b"\r")
    return b""


def check_text(path: str, block: bytes) -> None:
    """Raises InvalidArgument when the first bytes of a file, after inflation, are not those of a text."""
    kind = next((kind for magic, kind in _MAGICS.items() if block.startswith(magic)), "")
    if kind or b"\0" in block[:_LOOKED_AT]:
        what = f"it is a {kind} file" if kind else "it holds zero bytes"
        raise InvalidArgument(
            f"{path}: {what}, and not text; allowed: plain lines, or lines compressed by gzip or zstd in a file whose "
            "name ends in .gz or .zst"
        )


def _too_long(path: str, line: int) -> InvalidArgument:
    return InvalidArgument(f"{path}, line {line}: the line is longer than {_MAX_LINE_BYTES} bytes; is it a text file?")


def _line_ends(block: bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE) + 1


def header_end(path: str) -> LinePosition:
    """Returns the position of the second line.

    Raises:
        NotFound, DataLoss: the file cannot be read.
        InvalidArgument: the first line is longer than 1 MiB.
    """
    with open_text(path) as source:
        block = read_bytes(source, path, _MAX_LINE_BYTES + 1)
    end = block.find(b"\n") + 1
    if not end and len(block) > _MAX_LINE_BYTES:
        raise _too_long(path, 1)
    return LinePosition(end or len(block), 2)


def read_runs(path: str, begin: LinePosition | None = None, run_bytes: int = _BLOCK_BYTES) -> Iterator[LineWindow]:
    """Yields the file in runs of whole lines.

    Args:
        path: the path of the file.
        begin: the position of the first line to read; None: the beginning of the file.
        run_bytes: about how many bytes a run has.

    Raises:
        NotFound, DataLoss: the file cannot be read.
        InvalidArgument: a line is longer than 1 MiB.
    """
    place = begin or LinePosition()
    rest = b""  # an unfinished line, which begins at `place`
    with open_text(path) as source:
        if not place.offset and read_bytes(source, path, len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK:
            place = LinePosition(len(_BYTE_ORDER_MARK), place.line)
        source.seek(place.offset)
        while block := read_bytes(source, path, run_bytes):
            end = block.rfind(b"\n") + 1
            if end:
                text = rest + block[:end]
                window = LineWindow(path, place, text, text.count(b"\n"))
                yield window
                place, rest = window.end, block[end:]
            else:
                rest += block
            if len(rest) > _MAX_LINE_BYTES:
                raise _too_long(path, place.line)
    if rest:
        yield LineWindow(path, place, rest, 1)
