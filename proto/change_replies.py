"""Writes and reads replies to ReadChanges (changes.proto) without copying their page into a message or out of it.

A page has megabytes, and two copies of it cost as much as reading its rows. The bytes are those of a ReadChangesReply,
so that any protobuf parser can read them. The page comes last and begins at a multiple of 8.
"""

from __future__ import annotations

from typing import Any

from . import changes_pb2 as pb
from .errors import DataLoss

METHOD = "/sparserow.v1.Changes/ReadChanges"

_PAGE = pb.ReadChangesReply.DESCRIPTOR.fields_by_name["page"].number << 3 | 2
_PADDING = pb.ReadChangesReply.DESCRIPTOR.fields_by_name["padding"].number << 3 | 2
_VARINT, _LENGTH = 0, 2  # wire types of the fields that a reply may have
_MOST_VARINT_BYTES = 10


def write_reply(fields: pb.ReadChangesReply, page: Any) -> bytes:
    """Returns the bytes of a reply.

    Args:
        fields: all fields but the page.
        page: the bytes of the page, as a buffer; it may be empty.
    """
    before: bytes = fields.SerializeToString()
    if len(page) == 0:
        return before
    head = bytes((_PAGE,)) + _varint(len(page))
    gap = -(len(before) + 2 + len(head)) % 8
    return b"".join((before, bytes((_PADDING, gap)), bytes(gap), head, page))


def read_reply(data: bytes) -> tuple[pb.ReadChangesReply, memoryview]:
    """Returns all fields but the page, and the page as a view of ``data``, which is empty when there is no page.

    Raises:
        DataLoss: the bytes are not a reply.
    """
    page = memoryview(b"")
    others = []
    at = 0
    while at < len(data):
        begin = at
        tag, at = _read_varint(data, at)
        length, at = _read_varint(data, at)
        if tag & 7 == _LENGTH:
            at += length
        if tag & 7 not in (_VARINT, _LENGTH) or at > len(data):
            raise DataLoss("a reply to ReadChanges is damaged")
        if tag == _PAGE:
            page = memoryview(data)[at - length : at]
        else:
            others.append(data[begin:at])
    return pb.ReadChangesReply.FromString(b"".join(others)), page


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number at ``at``, and the offset behind it."""
    value = 0
    for count, byte in enumerate(data[at : at + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value, at + count + 1
    raise DataLoss("a reply to ReadChanges is damaged")
