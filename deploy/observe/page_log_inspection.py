"""Reads the files of the SSD engine ``pages`` of a stopped shard, independently of the code that wrote them.

``page_format.h`` in ``cpp_ext/store/ssd/pages`` describes pages, ``page_log.cc`` the file of the index that a clean end
leaves. Without that file the newest record of each key counts; then rows that were deleted may be among them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...proto.errors import DataLoss

UNIT_BYTES = 4096
SEGMENT_BYTES = 1 << 20
_HEADER = struct.Struct("<IHHQQQIIHHHHHH12x")
_CHECKSUM_END = 16
_MAGIC = 0x47505253
_INDEX_HEAD = struct.Struct("<4I")  # magic, format, tables, partitions
_INDEX_MAGIC = 0x58495253
FORMAT, INDEX_FORMAT = 1, 2  # of a page, and of the index
_TABLE_HEAD = struct.Struct("<2I")  # table id, record bytes
_VERSION = slice(16, 24)  # bytes of a row image (row_codec.h)
_PLACE = np.dtype([("bytes", "u1", 5)])


class StoredImage(NamedTuple):
    """A row's image where it lies: its slot, table id and key, and the bytes of ``row_codec.h``."""

    slot: int
    table_id: int
    key: int
    image: bytes


class _Record(NamedTuple):
    place: int
    version: int
    stored: StoredImage


def page_log_rows(folder: Path) -> Iterator[StoredImage]:
    """Yields every row in ``folder``, the folder ``rows`` of a shard.

    Raises:
        DataLoss: a page that has rows fails its checksum, the index is not whole, or one of them has another format.
    """
    live = _live_places(folder / "index")
    newest: dict[tuple[int, int], _Record] = {}
    for record in _records(folder / "pages", live):
        if live is not None:
            if record.place in live:
                yield record.stored
            continue
        row = (record.stored.table_id, record.stored.key)
        if row not in newest or newest[row].version < record.version:
            newest[row] = record
    for record in newest.values():
        yield record.stored


def _live_places(path: Path) -> set[int] | None:
    """Returns the places that the index has; None where the shard did not end cleanly, or its index was too large."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    places: list[NDArray[np.uint64]] = []
    try:
        magic, version, tables, partitions = _INDEX_HEAD.unpack_from(stored)
        at = _INDEX_HEAD.size
        if magic != _INDEX_MAGIC:
            raise DataLoss(f"{path} is not an index of pages")
        if version != INDEX_FORMAT:
            raise DataLoss(f"{path}: the index has format {version}; this program reads format {INDEX_FORMAT}")
        for _ in range(tables):
            at += _TABLE_HEAD.size
            for _ in range(partitions):
                (count,) = struct.unpack_from("<Q", stored, at)
                found = np.frombuffer(stored, _PLACE, count, at + 8)
                at += 8 + found.nbytes
                weights = np.left_shift(np.uint64(1), np.arange(0, 40, 8, dtype=np.uint64))
                places.append((found["bytes"].astype(np.uint64) * weights).sum(axis=-1, dtype=np.uint64))
    except (struct.error, ValueError):
        raise DataLoss(f"{path} ends too early") from None
    return set(np.concatenate(places).tolist()) if places else set()


def _records(path: Path, live: set[int] | None) -> Iterator[_Record]:
    """Yields every record of the file; a later write of a row has the higher version."""
    with path.open("rb") as file:
        file.seek(SEGMENT_BYTES)  # segment 0 is never used
        segment = 1
        while stored := file.read(SEGMENT_BYTES):
            unit = 0
            while (unit + 1) * UNIT_BYTES <= len(stored):
                at = unit * UNIT_BYTES
                magic, version, units, checksum, _, _, table_id, record_bytes, rows, *_, slot_bits = (
                    _HEADER.unpack_from(stored, at)
                )
                if magic != _MAGIC or units == 0:
                    break
                if version != FORMAT:
                    place = f"{path}: the page at byte {segment * SEGMENT_BYTES + at}"
                    raise DataLoss(f"{place} has format {version}; this program reads format {FORMAT}")
                first = segment << 16 | unit << 8
                end = at + _HEADER.size + rows * record_bytes
                is_whole = end <= len(stored) and checksum == xxhash.xxh3_64_intdigest(stored[at + _CHECKSUM_END : end])
                if not is_whole:
                    if live is None or any(first + row in live for row in range(rows)):
                        raise DataLoss(f"{path}: the page at byte {segment * SEGMENT_BYTES + at} fails its checksum")
                    break
                for row in range(rows):
                    record = at + _HEADER.size + row * record_bytes
                    key = stored[record : record + 8]
                    slot = xxhash.xxh3_64_intdigest(key, seed=table_id) >> (64 - slot_bits)
                    image = stored[record + 8 : record + record_bytes]
                    yield _Record(
                        first + row,
                        int.from_bytes(image[_VERSION], "little"),
                        StoredImage(slot, table_id, int.from_bytes(key, "little"), image),
                    )
                unit += units
            segment += 1
