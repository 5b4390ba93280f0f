"""One reading and one reply serve all viewers of the same rights."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.errors import ResourceExhausted, Unavailable
from sparserow.ps_server.coordinator.page import replies as replies_module
from sparserow.ps_server.coordinator.page.replies import PageReplies
from stubbed_page import large_status


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Source:
    """A status that counts how often it is read, and may wait."""

    def __init__(self, status: pb.GetStatusReply) -> None:
        self.status: Any = status
        self.reads = 0
        self.go = asyncio.Event()
        self.go.set()

    async def read(self) -> pb.GetStatusReply:
        self.reads += 1
        await self.go.wait()
        if isinstance(self.status, Exception):
            raise self.status
        return self.status


def two_namespaces() -> pb.GetStatusReply:
    reply = large_status(2, 1)
    reply.tables.add(id=9, namespace="feed", name="item", dim=4)
    return reply


def document(reply: Any) -> Any:
    return json.loads(reply.plain)


def test_a_hundred_viewers_cost_one_reply_a_second() -> None:
    async def run() -> None:
        clock, source = Clock(), Source(large_status(3, 4))
        replies = PageReplies(source.read, shards=3, coordinator="a:1", clock=clock)
        for second in range(10):
            clock.now = 1.001 * second
            first, *others = await asyncio.gather(*(replies.reply(None) for _ in range(100)))
            assert all(other is first for other in others), "viewers share the bytes too"
        assert (source.reads, replies.made) == (10, 10)
        assert json.loads(gzip.decompress(first.packed)) == document(first)

    asyncio.run(run())


def test_a_reply_that_costs_much_is_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes at most a twentieth of a core, whatever the status."""

    async def run() -> None:
        clock, source = Clock(), Source(large_status(1, 1))
        replies = PageReplies(source.read, shards=1, coordinator="a:1", clock=clock)
        times = iter(range(1000))
        monkeypatch.setattr(replies_module.time, "thread_time", lambda: 0.2 * next(times))
        await replies.reply(None)
        clock.now = 3.9
        await replies.reply(None)
        assert replies.made == 1
        clock.now = 4.1
        await replies.reply(None)
        assert replies.made == 2

    asyncio.run(run())


def test_viewers_that_wait_for_a_slow_reading_wait_for_the_same() -> None:
    async def run() -> None:
        source = Source(two_namespaces())
        replies = PageReplies(source.read, shards=2, coordinator="a:1")
        source.go.clear()
        waiting = [asyncio.ensure_future(replies.reply(scope)) for scope in (None, None, ("ads",), ("feed",))]
        gone = asyncio.ensure_future(replies.reply(None))
        await asyncio.sleep(0.01)
        gone.cancel()
        source.go.set()
        whole, same, ads, feed = await asyncio.gather(*waiting)
        assert source.reads == 1
        assert whole is same
        assert [each["table"] for each in document(whole)["status"]["tables"]] == ["ads/table-000", "feed/item"]
        assert [each["table"] for each in document(ads)["status"]["tables"]] == ["ads/table-000"]
        assert document(feed)["namespaces"] == ["feed"]
        assert [each["rows"] for each in document(feed)["status"]["shards"]] == [0, 0]

    asyncio.run(run())


def test_rates_are_of_the_reading_before() -> None:
    async def run() -> None:
        clock, source = Clock(), Source(large_status(1, 1))
        replies = PageReplies(source.read, shards=1, coordinator="a:1", clock=clock)
        assert document(await replies.reply(None))["status"]["shards"][0]["requests_per_sec"] is None
        source.status = large_status(1, 1)
        source.status.shards[0].requests += 500
        clock.now = 2.0
        status = document(await replies.reply(None))["status"]
        assert (status["over_sec"], status["shards"][0]["requests_per_sec"]) == (2.0, 250.0)

    asyncio.run(run())


def test_samples_fill_the_series_and_failures_are_gaps() -> None:
    async def run() -> None:
        clock, source = Clock(), Source(large_status(1, 1))
        replies = PageReplies(source.read, shards=1, coordinator="a:1", clock=clock)
        first = await replies.sample(None)
        source.status, clock.now = Unavailable("another coordinator leads"), 10.0
        assert await replies.sample(first) is None
        with pytest.raises(Unavailable, match="another coordinator leads"):
            await replies.reply(None)
        source.status, clock.now = large_status(1, 1), 20.0
        await replies.sample(None)
        series = document(await replies.reply(None))["series"]
        assert series["cluster"]["rows"] == [10, None, 10]

    asyncio.run(run())


def test_what_is_kept_and_what_is_sent_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        source = Source(large_status(1, 1))
        replies = PageReplies(source.read, shards=1, coordinator="a:1")
        for number in range(100):
            await replies.reply((f"namespace-{number}",))
        assert len(replies._kept) == len(replies._series) == 32
        assert not replies._making
        monkeypatch.setattr(replies_module, "MOST_REPLY_BYTES", 100)
        with pytest.raises(ResourceExhausted, match=r"the page shows at most 100; `sparserow status --json -`"):
            await replies.reply(None)

    asyncio.run(run())


def test_a_status_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        source = Source(large_status(1, 1))
        source.go.clear()
        replies = PageReplies(source.read, shards=1, coordinator="a:1")
        monkeypatch.setattr(replies_module, "_READ_SEC", 0.01)
        with pytest.raises(Unavailable, match="the status could not be read within"):
            await replies.reply(None)
        source.go.set()
        await replies.reply(None)

    asyncio.run(run())
