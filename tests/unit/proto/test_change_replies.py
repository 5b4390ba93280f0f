"""Replies to ReadChanges are written and read without protobuf's copies, and are protobuf messages all the same."""

from __future__ import annotations

import pytest

from sparserow.proto import changes_pb2 as pb
from sparserow.proto.change_replies import read_reply, write_reply
from sparserow.proto.errors import DataLoss


@pytest.mark.parametrize("size", [0, 1, 7, 127, 128, 5_000, 70_000])
def test_a_reply_is_a_message_whose_page_is_aligned(size: int) -> None:
    page = bytes(i % 251 for i in range(size))
    for fields in (
        pb.ReadChangesReply(),
        pb.ReadChangesReply(slots=3, next_begin=300, is_last=True),
        pb.ReadChangesReply(slots=2**32 - 1, next_begin=2**32 - 1),
    ):
        data = write_reply(fields, page)
        message = pb.ReadChangesReply.FromString(data)
        assert message.page == page
        assert (message.slots, message.next_begin, message.is_last) == (
            fields.slots,
            fields.next_begin,
            fields.is_last,
        )
        assert not page or (len(data) - len(page)) % 8 == 0
        got, read = read_reply(data)
        assert bytes(read) == page
        assert (got.slots, got.next_begin, got.is_last) == (fields.slots, fields.next_begin, fields.is_last)


def test_a_reply_of_any_writer_is_read() -> None:
    message = pb.ReadChangesReply(page=b"p" * 300, slots=5, next_begin=9)  # the page comes first
    fields, page = read_reply(message.SerializeToString())
    assert (bytes(page), fields.slots, fields.next_begin) == (message.page, 5, 9)
    assert read_reply(b"")[1] == b""


def test_damaged_replies_are_refused() -> None:
    data = write_reply(pb.ReadChangesReply(slots=5), b"p" * 300)
    for damaged in (data[:-1], data[:1], b"\xff" * 30, b"\x0d\x00\x00\x00\x00"):
        with pytest.raises(DataLoss, match="ReadChanges"):
            read_reply(damaged)
