"""A follower that waits is woken by a change, and not by looks at the slots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparserow.cpp_ext import _server
from sparserow.proto import changes_pb2 as pb
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.ps_server.shard.changes import ChangesService
from sparserow.ps_server.shard.native_schema import native_schema

SLOTS = 16
KEYS = np.arange(64, dtype=np.uint64)


class Counting:
    """A store that counts the looks at its changes."""

    def __init__(self, store: Any) -> None:
        self._store, self.looks = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read_changes(self, *words: Any, **options: Any) -> Any:
        self.looks += 1
        return self._store.read_changes(*words, **options)


@pytest.fixture
def store() -> Counting:
    made = _server.Store(slot_count=SLOTS, lineage=1, change_log_bytes=1 << 20)
    for number, name in ((1, "a"), (2, "b")):
        made.create_table(native_schema(TableSchema("n", name, 4, SGD(), id=number)))
    return Counting(made)


def push(store: Any, table: int) -> None:
    store.apply(table, KEYS, np.ones((len(KEYS), 4), np.float32), lr=1.0)


def run(store: Any, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def opened(store: Any, **options: Any) -> ChangesService:
    open_gate = SimpleNamespace(look=lambda _: nullcontext())
    engine = SimpleNamespace(store=store, cluster_id=5, follow_gate=open_gate)
    service = ChangesService(lambda: engine)
    store.open_cursor("c", store.change_versions(), tables=[1], **options)
    return service


async def read(service: ChangesService, wait_ms: int) -> tuple[float, pb.ReadChangesReply]:
    begun = time.monotonic()
    data = await service.ReadChanges(pb.ReadChangesRequest(cursor="c", max_bytes=1 << 20, wait_ms=wait_ms), None)
    return time.monotonic() - begun, pb.ReadChangesReply.FromString(data)


def test_a_change_ends_the_wait(store: Counting) -> None:
    async def work() -> None:
        service = await opened(store)
        waiting = asyncio.create_task(read(service, 10_000))
        await asyncio.sleep(0.3)
        assert store.looks == 1
        await asyncio.to_thread(push, store, 1)
        taken, reply = await waiting
        assert reply.slots > 0
        assert taken < 10

    run(store, work())


def test_without_a_change_it_looks_twice(store: Counting) -> None:
    async def work() -> None:
        service = await opened(store)
        _, reply = await read(service, 400)
        assert (reply.slots, store.looks) == (0, 2)

    run(store, work())


def test_several_followers_are_woken_by_one_change(store: Counting) -> None:
    async def work() -> None:
        service = await opened(store)
        for number in range(8):
            store.open_cursor(f"c{number}", store.change_versions(), tables=[1])
        requests = [pb.ReadChangesRequest(cursor=f"c{n}", max_bytes=1 << 20, wait_ms=10_000) for n in range(8)]
        waiting = [asyncio.create_task(service.ReadChanges(request, None)) for request in requests]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(push, store, 1)
        replies = [pb.ReadChangesReply.FromString(data) for data in await asyncio.gather(*waiting)]
        assert all(reply.slots > 0 for reply in replies)

    run(store, work())
