"""What the record batches of an Arrow file become when they are inflated, by the file's metadata.

Arrow takes the memory that a compressed buffer claims, and offers no look at the claim. So the messages are read here:
flatbuffers of the tables Footer, Message, RecordBatch and DictionaryBatch, as the Arrow format defines them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

_MAGIC_BYTES = 6
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
_BUFFER = np.dtype([("offset", "<i8"), ("bytes", "<i8")])
_DICTIONARIES, _BATCHES = 2, 3  # fields of Footer
_VERSION, _HEADER = 0, 2  # of Message
_V5 = 4  # of MetadataVersion
_ROWS, _BUFFERS, _COMPRESSION, _VARIADIC = 0, 2, 3, 4  # of RecordBatch
_DATA = 1  # of DictionaryBatch
_EARLY_COMPRESSION = b"ARROW:experimental_compression"  # in the metadata of messages that Arrow 0.17 wrote
_NOT_COMPRESSED = -1  # in place of a buffer's inflated length


@dataclass(frozen=True)
class BatchSize:
    """What a record batch is.

    Attributes:
        rows: the number of its rows.
        stored: the bytes that the file has of the buffers.
        inflated: the bytes that they have when they are inflated.
    """

    rows: int
    stored: int
    inflated: int


class IpcSizes:
    """The sizes of the messages of an Arrow file.

    Args:
        source: the file, as Arrow opened it.
        schema: its schema.

    Raises:
        pa.ArrowInvalid: the metadata leads out of the file.
    """

    def __init__(self, source: Any, schema: Any) -> None:
        self._source, self._schema, self._end = source, schema, source.size()
        tail = self._bytes(self._end - _MAGIC_BYTES - 4, 4)
        size = int.from_bytes(tail, "little")
        footer = _root(self._bytes(self._end - _MAGIC_BYTES - 4 - size, size), 0)
        self._dictionaries, self._batches = footer.structs(_DICTIONARIES, _BLOCK), footer.structs(_BATCHES, _BLOCK)

    def dictionaries(self) -> BatchSize:
        """Returns the sum of all dictionaries, which Arrow reads with the first record batch."""
        found = [self._size(block, None, is_dictionary=True) for block in self._dictionaries]
        return BatchSize(0, sum(each.stored for each in found), sum(each.inflated for each in found))

    def batch(self, at: int, fields: Sequence[int]) -> BatchSize:
        """Returns a record batch of which some fields are read.

        Args:
            at: the number of the record batch.
            fields: the positions of the fields in the schema.
        """
        return self._size(self._batches[at], fields, is_dictionary=False)

    def _size(self, block: Any, fields: Sequence[int] | None, *, is_dictionary: bool) -> BatchSize:
        offset, metadata, body = int(block["offset"]), int(block["metadata"]), int(block["body"])
        self._check(offset + metadata, body)
        data = self._bytes(offset, metadata)
        begin = 8 if data[:4] == b"\xff\xff\xff\xff" else 4  # of the flatbuffer, behind its length
        message = _root(data, begin)
        if (
            fields is not None
            and message.int16(_VERSION) < _V5
            and any(types.is_union(each.type) for each in self._schema)
        ):
            fields = None  # unions have one buffer more there: all columns are counted
        batch = message.table(_HEADER)
        batch = batch.table(_DATA) if is_dictionary else batch
        buffers = batch.structs(_BUFFERS, _BUFFER)
        if fields is not None:
            views = batch.structs(_VARIADIC, np.dtype("<i8"))
            buffers = buffers[_buffers_of(self._schema, fields, views, len(buffers))]
        if any(size < 0 for size in buffers["bytes"].tolist()):
            raise pa.ArrowInvalid("a buffer has a negative length")
        stored = inflated = sum(buffers["bytes"].tolist())
        if batch.has(_COMPRESSION) or _EARLY_COMPRESSION in data:
            places = zip(buffers["offset"].tolist(), buffers["bytes"].tolist(), strict=True)
            inflated = sum(self._inflated(offset + metadata + at, size) for at, size in places)
        return BatchSize(batch.int64(_ROWS), min(stored, body), inflated)

    def _inflated(self, at: int, size: int) -> int:
        """Returns the bytes that a compressed buffer becomes; the first eight of it say so."""
        if size < 8:
            return 0
        claim = int.from_bytes(self._bytes(at, 8), "little", signed=True)
        if claim < _NOT_COMPRESSED:
            raise pa.ArrowInvalid(f"a buffer at {at} says that it has {claim} bytes")
        return size - 8 if claim == _NOT_COMPRESSED else claim

    def _bytes(self, at: int, size: int) -> bytes:
        self._check(at, size)
        found: bytes = self._source.read_at(size, at)
        return found

    def _check(self, at: int, size: int) -> None:
        if at < 0 or size < 0 or at + size > self._end:
            raise pa.ArrowInvalid(f"its metadata lead to {size} bytes at {at} of {self._end}")


class _Table:
    """A table of a flatbuffer, whose fields have numbers."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._names = at - _unpack("<i", data, at)
        self._names_bytes = _unpack("<H", data, self._names)

    def has(self, field: int) -> bool:
        """Whether the field stands in the table."""
        return self._place(field) is not None

    def int64(self, field: int) -> int:
        """Returns a number; 0 when it does not stand there."""
        place = self._place(field)
        return 0 if place is None else _unpack("<q", self._data, place)

    def int16(self, field: int) -> int:
        """Returns a short number; 0 when it does not stand there."""
        place = self._place(field)
        return 0 if place is None else _unpack("<h", self._data, place)

    def table(self, field: int) -> _Table:
        """Returns a table."""
        place = self._place(field)
        if place is None:
            raise pa.ArrowInvalid("its metadata lack a table")
        return _Table(self._data, place + _unpack("<I", self._data, place))

    def structs(self, field: int, kind: np.dtype[Any]) -> npt.NDArray[Any]:
        """Returns the elements of a vector."""
        place = self._place(field)
        if place is None:
            return np.empty(0, kind)
        begin = place + _unpack("<I", self._data, place)
        count = _unpack("<I", self._data, begin)
        if begin + 4 + count * kind.itemsize > len(self._data):
            raise pa.ArrowInvalid("its metadata are cut short")
        return np.frombuffer(self._data, kind, count, begin + 4)

    def _place(self, field: int) -> int | None:
        slot = 4 + 2 * field
        offset = _unpack("<H", self._data, self._names + slot) if slot + 2 <= self._names_bytes else 0
        return self._at + offset if offset else None


def _root(data: bytes, at: int) -> _Table:
    return _Table(data, at + _unpack("<I", data, at))


def _unpack(form: str, data: bytes, at: int) -> int:
    if at < 0 or at + struct.calcsize(form) > len(data):
        raise pa.ArrowInvalid("its metadata are cut short")
    found: int = struct.unpack_from(form, data, at)[0]
    return found


def _buffers_of(
    schema: Any, fields: Sequence[int], variadic: npt.NDArray[np.int64], most: int
) -> npt.NDArray[np.int64]:
    """Returns the numbers of the buffers of the fields at some positions of a schema, each below ``most``.

    ``variadic`` has the numbers of data buffers of the columns of views, in order.
    """
    views = iter(variadic.tolist())
    ends = np.cumsum([0, *(min(_buffer_count(field.type, views), most) for field in schema)])
    found = [np.arange(ends[at], ends[at + 1]) for at in fields]
    numbers = np.concatenate([np.empty(0, np.int64), *found])
    return numbers[numbers < most]


def _buffer_count(kind: Any, views: Iterator[int]) -> int:
    """Returns the number of buffers of an array with its children."""
    if isinstance(kind, pa.BaseExtensionType):
        return _buffer_count(kind.storage_type, views)
    if types.is_null(kind):
        return 0
    if types.is_dictionary(kind):
        return 2  # its values are in messages of their own
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return 2 + max(0, next(views, 0))
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return 3
    own = 2
    if types.is_union(kind):
        own = 2 if kind.mode == "dense" else 1
    elif types.is_struct(kind) or types.is_fixed_size_list(kind):
        own = 1
    elif types.is_run_end_encoded(kind):
        return _buffer_count(kind.run_end_type, views) + _buffer_count(kind.value_type, views)
    elif types.is_list_view(kind) or types.is_large_list_view(kind):
        own = 3
    return own + sum(_buffer_count(kind.field(at).type, views) for at in range(kind.num_fields))
