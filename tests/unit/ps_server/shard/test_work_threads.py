"""Threads of servers: long work has its own, and holds up neither a change of members nor a look at aliases."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparserow.proto import control_pb2 as pb, serving_pb2
from sparserow.proto.errors import ResourceExhausted
from sparserow.ps_server.shard.service import ShardService
from sparserow.ps_server.shard.work_threads import OneAtATime
from sparserow.serving.service import Address, ServingService

SWEEPS = 40  # more than an event loop has threads


class Sweeps:
    """They last until they are let go."""

    def __init__(self) -> None:
        self.gate, self.count = threading.Event(), 0

    def sweep(self, table_id: int, *, dry_run: bool) -> Any:
        assert not dry_run
        self.count += 1
        assert self.gate.wait(120)
        return SimpleNamespace(rows_seen=table_id, freed=[], is_complete=True, longest_hold_seconds=0.0)


class Engine:
    """What the service asks of a shard's engine here."""

    shard = 3

    def __init__(self) -> None:
        self.sweeps = Sweeps()

    def freeze_job(self, _: pb.FreezeJobRequest) -> pb.FreezeJobReply:
        return pb.FreezeJobReply()


async def drain(_: int) -> None:
    raise AssertionError("not asked for")


def test_many_sweeps_leave_room_for_a_hold() -> None:
    engine = Engine()

    async def run() -> None:
        service = ShardService(lambda: engine, drain)  # type: ignore[arg-type,return-value]
        request = pb.ShardSweepRequest(table_id=7)
        sweeps = [asyncio.create_task(service.Sweep(request, None)) for _ in range(SWEEPS)]
        await asyncio.wait_for(service.HoldJob(pb.FreezeJobRequest(), None), 60)
        assert not sweeps[0].done()
        # A caller that is gone leaves its sweep behind.
        sweeps[0].cancel()
        refused = await asyncio.gather(*sweeps, return_exceptions=True)
        assert isinstance(refused.pop(0), asyncio.CancelledError)
        words = "shard 3: a sweep is running, and one runs at a time; try again when it has ended"
        assert {(type(error), str(error)) for error in refused} == {(ResourceExhausted, words)}
        with pytest.raises(ResourceExhausted):
            await service.Sweep(request, None)
        engine.sweeps.gate.set()
        reply = None
        while reply is None:
            try:
                reply = await service.Sweep(request, None)
            except ResourceExhausted:
                await asyncio.sleep(0.01)
        assert (reply.rows_seen, engine.sweeps.count) == (7, 2)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_work_that_fails_lets_the_next_in() -> None:
    async def run() -> None:
        one = OneAtATime("test", "work")

        def fail() -> None:
            raise ValueError("it failed")

        with pytest.raises(ValueError, match="it failed"):
            await one.run(fail)
        assert await one.run(lambda: 5) == 5

    asyncio.run(asyncio.wait_for(run(), 120))


def test_lookups_answer_while_calls_with_values_wait_for_features() -> None:
    """As while a version's vocabularies are read for the first time, and more callers want them than threads."""
    gate, count = threading.Event(), 64

    class Lookup:
        def lookup(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(version=1, dense_version=0, tables=[], problems=[])

        def keys(self, *_: Any, **__: Any) -> Any:
            assert gate.wait(120)
            return 1, np.arange(1, dtype=np.uint64)

    async def run() -> None:
        service = ServingService(None, Lookup(), None, Address("127.0.0.1", 1))  # type: ignore[arg-type]
        context = SimpleNamespace(invocation_metadata=lambda: (), time_remaining=lambda: None)
        asked = serving_pb2.MakeKeysRequest(model="m", feature="user", values=["u"])
        made = [asyncio.create_task(service.MakeKeys(asked, context)) for _ in range(count)]
        await asyncio.sleep(0)
        reply = await asyncio.wait_for(service.Lookup(serving_pb2.LookupRequest(model="m"), context), 60)
        assert reply.version == 1
        gate.set()
        assert len(await asyncio.gather(*made)) == count

    asyncio.run(asyncio.wait_for(run(), 120))


def test_lookups_that_wait_leave_the_loop_its_threads() -> None:
    gate = threading.Event()

    class Lookup:
        def lookup(self, *_: Any, **__: Any) -> Any:
            assert gate.wait(120)
            return SimpleNamespace(version=1, dense_version=0, tables=[], problems=[])

    async def run() -> None:
        service = ServingService(None, Lookup(), None, Address("127.0.0.1", 1))  # type: ignore[arg-type]
        context = SimpleNamespace(invocation_metadata=lambda: (), time_remaining=lambda: None)
        request = serving_pb2.LookupRequest(model="m")
        lookups = [asyncio.create_task(service.Lookup(request, context)) for _ in range(SWEEPS)]
        await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.to_thread(int), 60)  # as the look at aliases
        gate.set()
        assert {reply.version for reply in await asyncio.gather(*lookups)} == {1}

    asyncio.run(asyncio.wait_for(run(), 120))
