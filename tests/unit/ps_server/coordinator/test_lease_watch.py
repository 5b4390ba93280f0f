"""The loop that ends leases goes on after an error, and the log has it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sparserow.ps_server.coordinator.server import _watch_leases


def test_an_error_does_not_end_it_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    def expire_leases(_: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyError("a job that is forgotten")

    async def run() -> None:
        service: Any = SimpleNamespace(expire_leases=expire_leases)
        leases = SimpleNamespace(lease_sec=0.2)
        cluster: Any = SimpleNamespace(jobs=leases, shards=leases)
        watching = asyncio.create_task(_watch_leases(service, cluster))
        for _ in range(1000):
            if calls >= 3 or watching.done():
                break
            await asyncio.sleep(0.01)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    with caplog.at_level(logging.ERROR, "sparserow.ps_server.coordinator.server"):
        asyncio.run(run())
    assert calls >= 3
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "a job that is forgotten" in str(record.exc_info[1])
