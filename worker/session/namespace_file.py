"""A file of a namespace, as rows of a table of its own: it is saved, restored, moved and dropped with the others.

A row has 256 bytes of the file, each as one number: every dtype of the wire has these exactly. The row of
``_HEAD_KEY`` is written last and has the length and the digest of the whole, so that no reader takes a part for it. Two
contents alternate between two ranges of keys, and the former one's rows are deleted: nothing grows.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from ...proto.errors import DataLoss, InvalidArgument, NotFound
from ...proto.optim import SGD
from ...proto.row_keys import KeyArray
from ...proto.schema import Constant, TableSchema
from .session_parts import NamespaceCore
from .table import KeyedRows

Pull: TypeAlias = Callable[[KeyArray], npt.NDArray[np.float32]]

MOST_BYTES = 64 << 20
ROW_BYTES = 256
_ROWS_AT_ONCE = 16384
_HEAD_KEY = 2**63 - 1
_HEAD = struct.Struct("<4sIQ16s")  # magic, the range of keys, the length, the digest
_MAGIC = b"SPRF"
_RANGE = 1 << 32
_TRIES = 5
_POLL_SEC = 0.2


class NamespaceFile:
    """A file of at most 64 MiB. Its table is hidden: no model reads it, and no version publishes it.

    Args:
        core: a session of the namespace.
        name: the name of the file, which ``is_file_table`` knows.

    Attributes:
        where: the place of the file, for error texts.
    """

    def __init__(self, core: NamespaceCore, name: str) -> None:
        self._core, self._name = core, name
        self._rows: KeyedRows | None = None  # of the writer
        self._schema = TableSchema(core.namespace, name, ROW_BYTES, SGD(lr=0.0), init=Constant(0.0))
        self.where = f"table {core.namespace}/{name}"

    def read(self) -> bytes | None:
        """Returns the contents; None: there is no such file.

        Raises:
            DataLoss: the rows are those of no file, as after a shard came back from an older checkpoint.
        """
        if all(schema.name != self._name for schema in self._core.catalog.list_tables(self._core.namespace)):
            return None
        table = self._core.create_table(self._schema)  # waits for the shards, where another worker has just made it
        for _ in range(_TRIES - 1):
            try:
                return file_of_rows(table.pull, self.where)
            except DataLoss:
                time.sleep(_POLL_SEC)  # another worker is writing the next contents
        return file_of_rows(table.pull, self.where)

    def write(self, data: bytes) -> None:
        """Keeps these contents in place of those before. One worker writes a file at a time.

        Raises:
            InvalidArgument: they are larger than a file may be.
        """
        if len(data) > MOST_BYTES:
            raise InvalidArgument(f"{self.where}: {len(data):,} bytes are too many; allowed: at most {MOST_BYTES:,}")
        if self._rows is None:
            self._rows = self._core.create_table(self._schema)
        try:
            self._write(self._rows, data)
        except NotFound:  # it was dropped since
            self._rows = None
            raise

    def _write(self, rows: KeyedRows, data: bytes) -> None:
        former = _head(rows.pull, self.where)
        place = 0 if former is None else 1 - former[0]
        values = np.zeros((math.ceil(len(data) / ROW_BYTES), ROW_BYTES), dtype=np.float32)
        values.reshape(-1)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        for begin in range(0, len(values), _ROWS_AT_ONCE):
            some = values[begin : begin + _ROWS_AT_ONCE]
            rows.assign(_keys(place, begin, begin + len(some)), some)
        head = np.zeros((1, ROW_BYTES), dtype=np.float32)
        packed = _HEAD.pack(_MAGIC, place, len(data), xxh3_128_digest(data))
        head[0, : _HEAD.size] = np.frombuffer(packed, dtype=np.uint8)
        rows.assign([_HEAD_KEY], head)
        if former is not None:
            count = math.ceil(former[1] / ROW_BYTES)
            for begin in range(0, count, _ROWS_AT_ONCE):
                rows.delete(_keys(former[0], begin, min(count, begin + _ROWS_AT_ONCE)))


def _keys(place: int, begin: int, end: int) -> KeyArray:
    return np.arange(place * _RANGE + begin, place * _RANGE + end, dtype=np.uint64)


def file_of_rows(pull: Pull, where: str) -> bytes | None:
    """Returns the file that rows are; None: there is none.

    Args:
        pull: returns the rows of keys, (n, 256) float32; zeros for a key that has none.
        where: the place of the file, for error texts.

    Raises:
        DataLoss: the rows are those of no file, as while another worker writes the next one.
    """
    head = _head(pull, where)
    if head is None:
        return None
    place, length, digest = head
    data = _bytes_of(pull, place, length)
    if xxh3_128_digest(data) != digest:
        raise DataLoss(
            f"{where}: its rows are of different contents, as after a shard came back from an older checkpoint; "
            "restore a checkpoint, or drop the table"
        )
    return data


def _head(pull: Pull, where: str) -> tuple[int, int, bytes] | None:
    row = pull(np.array([_HEAD_KEY], dtype=np.uint64))[0]
    if not row.any():
        return None
    magic, place, length, digest = _HEAD.unpack(row.astype(np.uint8).tobytes()[: _HEAD.size])
    if magic != _MAGIC or place > 1 or length > MOST_BYTES:
        raise DataLoss(f"{where}: its first row is that of no file; drop the table")
    return place, length, digest


def _bytes_of(pull: Pull, place: int, length: int) -> bytes:
    count = math.ceil(length / ROW_BYTES)
    parts = [
        pull(_keys(place, begin, min(count, begin + _ROWS_AT_ONCE))).astype(np.uint8).tobytes()
        for begin in range(0, count, _ROWS_AT_ONCE)
    ]
    return b"".join(parts)[:length]
