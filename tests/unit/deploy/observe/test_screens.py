"""Screens of a terminal: cells that stay whole at any width, keys, and a screen that scrolls."""

from __future__ import annotations

import io
import os
import time
from dataclasses import replace

import pytest
from rich.console import Console, Group

from sparserow.deploy.observe.cluster_screen import screen
from sparserow.deploy.observe.scrolled_screen import KeyReader, ScrolledScreen
from sparserow.deploy.observe.two_readings import of_namespace
from sparserow.deploy.observe.whole_cells import WholeCells
from sparserow.proto import control_pb2 as pb
from sparserow.proto.errors import NotFound
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.proto.schema_message import message_of_schema
from sparserow.proto.status.cluster_status import view_of

ADDRESSES = ["10.123.124.125:45123", "shard-1.ps.sparserow.svc.cluster.local:31234"]


def status() -> pb.GetStatusReply:
    """Of two shards and the namespaces ads and feed."""
    reply = pb.GetStatusReply(cluster_id=5, slot_count=16384, ready=True)
    for number, address in enumerate(ADDRESSES):
        shard = reply.shards.add(shard=number, slots=8192, pid=4194303, connections=12, requests=123456789)
        shard.data.host, _, port = address.rpartition(":")
        shard.data.port = int(port)
        shard.memory_budget_bytes, shard.used_bytes, shard.reserved_bytes = 64 << 30, 63 << 30, 48 << 20
        for table_id in (1, 2):
            shard.tables.add(table_id=table_id, rows=10 * table_id)
    for number, namespace in enumerate(("ads", "feed"), 1):
        schema = TableSchema(namespace, "user", 8, SGD(lr=0.5))
        reply.tables.append(message_of_schema(replace(schema, id=number)))
        job = reply.jobs.add(job_id=number, namespace=namespace, name="train", world_size=1, complete=True)
        job.members.add(rank=0, worker_id=number, epoch=1, step=7)
        reply.faults.add(namespace=namespace, job="train", host=ADDRESSES[1], message="an error " * 20, incident=1)
    return reply


def text_of(renderable: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_addresses_and_numbers_are_whole_at_any_width(width: int) -> None:
    reply = status()
    shown = text_of(screen("127.0.0.1:7000", reply, view_of(None, reply, 0.0)), width)
    for words in (
        *ADDRESSES,
        "4194303",
        "123,456,789",
        "63.0 GiB of 64.0 GiB, 48.0 MiB reserved",
        "ads/train",
        "feed/train",
        "feed/user",
    ):
        assert words in shown, shown
    assert max(map(len, shown.splitlines())) <= width


def test_a_table_goes_on_below_with_its_first_column() -> None:
    table = WholeCells("shards", ("shard", "data", "fault"), left=("data",), prose=("fault",))
    table.add_row("0", ADDRESSES[1], "[red] is no markup " * 5)
    lines = text_of(table, 64).splitlines()
    assert [line.split() for line in lines[:3]] == [["shards"], ["shard", "data"], ["0", ADDRESSES[1]]]
    assert lines[3].split() == ["shard", "fault"]
    assert " ".join(" ".join(line.split()) for line in lines[4:]) == "0 " + ("[red] is no markup " * 5).strip()
    assert len(text_of(table, 400).splitlines()) == 3, "it is not cut where there is room"


def test_one_namespace_is_shown_alone() -> None:
    reply = status()
    part = of_namespace(reply, "ads")
    view = view_of(None, part, 0.0)
    assert [table.table for table in view.tables] == ["ads/user"]
    assert [shard.rows for shard in view.shards] == [10, 10]
    shown = text_of(screen("a:1", part, view), 120)
    assert "feed" not in shown
    assert "ads/train" in shown
    assert len(reply.tables) == 2, "the status itself is as it was"
    assert of_namespace(reply, None) is reply
    with pytest.raises(
        NotFound, match=r"--namespace 'x': the cluster has no table, job or fault of it; namespaces: ads, feed"
    ):
        of_namespace(reply, "x")


def test_keys_are_read_whole_and_unknown_ones_left_out() -> None:
    reading, writing = os.pipe()
    keys = KeyReader(reading)
    os.write(writing, b"\x1b[A\x1b[6~x\x1b[15~\x1bOHG q")
    assert keys.read() == ["up", "page down", "home", "end", "page down", "quit"]
    os.write(writing, b"\x1b[5")
    assert keys.read() == []
    os.write(writing, b"~j")
    assert keys.read() == ["page up", "down"], "a key that came in two parts"
    os.close(writing)
    assert keys.read() == ["quit"], "the terminal is gone"
    os.close(reading)


def test_a_screen_scrolls_and_stays_within_its_lines() -> None:
    scrolled = ScrolledScreen(Group(*(f"line {number}" for number in range(30))))
    console = Console(file=io.StringIO(), width=100, height=11)

    def drawn() -> list[str]:
        lines = console.render_lines(scrolled, console.options.update(height=11))
        texts = ["".join(part.text for part in line).strip() for line in lines]
        assert len(texts) == 11
        return texts

    assert drawn()[0] == "line 0"
    assert drawn()[-1].startswith("lines 1 to 10 of 30; q: quit")
    for key, first in (("down", 1), ("page down", 10), ("end", 20), ("down", 20), ("up", 19), ("home", 0)):
        scrolled.move(key)
        assert (drawn()[0], drawn()[9]) == (f"line {first}", f"line {first + 9}"), key
    assert not scrolled.move("up")
    scrolled.move("end")
    scrolled.shown = Group("one line")
    assert drawn()[0] == "one line", "a screen that became shorter is shown from its last page"
    assert drawn()[-1].startswith("q: quit")


def with_stream(events: int) -> pb.GetStatusReply:
    reply = status()
    counts = pb.StreamCounts(events=events, dead=3, late=2)
    stream = pb.StreamStatus(source="kafka clicks", counts=counts, lag=77, parts=12)
    stream.watermark = int((time.time() - 300) * 1e6)
    reply.jobs[0].stream.CopyFrom(stream)
    return reply


def test_a_stream_is_shown_with_its_rate_and_how_far_it_is_behind() -> None:
    reply = with_stream(1_500)
    view = view_of(with_stream(500), reply, 2.0)
    (stream,) = view.as_dict()["streams"]
    assert (stream["job"], stream["events_per_sec"], stream["lag"]) == ("ads/train", 500.0, 77)
    assert 300 <= stream["behind_sec"] < 310
    shown = text_of(screen("127.0.0.1:7000", reply, view), 200)
    for words in ("kafka clicks", "1,500", "500", "77", "5 min"):
        assert words in shown
    assert view_of(None, status(), 0.0).streams == ()
