"""Ranks that wait for the others of their job, and callers that go while they wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sparserow.proto.errors import DeadlineExceeded
from sparserow.ps_server.coordinator.procedures.worker_registration import WorkerRegistrations
from sparserow.ps_server.coordinator.state.cluster import Cluster, ClusterOptions
from sparserow.ps_server.coordinator.state.membership import JobTerms, Ticket

TERMS = JobTerms(world_size=2, staleness=None, grad_scale="mean", quorum=None)


def made() -> tuple[Cluster, WorkerRegistrations]:
    cluster, unused = Cluster.create(ClusterOptions(shards=1, slot_count=64)), None
    parts: dict[str, Any] = {"save": unused, "clock": unused, "begin": unused, "wait_for": unused}
    return cluster, WorkerRegistrations(cluster, unused, unused, **parts)  # type: ignore[arg-type]


def come(cluster: Cluster, rank: int) -> Ticket:
    return cluster.jobs.register("n", "job", rank, TERMS)


def test_callers_that_are_cancelled_again_and_again_hold_nobody_up() -> None:
    async def run() -> None:
        cluster, registrations = made()
        first = come(cluster, 0)
        for turns in range(50):
            gone = asyncio.create_task(registrations._gather(first, 60.0))
            for turn in range(turns % 10):
                await asyncio.sleep(0)
                if turn == turns % 3:
                    registrations.notify()
                if turn >= turns % 4:
                    gone.cancel()
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
        waits = asyncio.create_task(registrations._gather(first, 60.0))
        await asyncio.sleep(0)
        registrations.notify()  # of another job
        await asyncio.sleep(0)
        assert not waits.done()
        come(cluster, 1)
        registrations.notify()
        await asyncio.wait_for(waits, 10)

    asyncio.run(run())


def test_a_rank_that_waits_in_vain_says_for_whom() -> None:
    async def run() -> None:
        cluster, registrations = made()
        with pytest.raises(
            DeadlineExceeded, match=r"1 of 2 ranks of job n/job came in 0\.1 s; rank 1 waited for rank 0"
        ):
            await registrations._gather(come(cluster, 1), 0.05)

    asyncio.run(run())
