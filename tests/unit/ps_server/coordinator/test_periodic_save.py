"""Saves that the coordinator makes by itself: how much time they leave to workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.errors import DeadlineExceeded, SparserowError, Unavailable
from sparserow.ps_server.coordinator.procedures.periodic_save import PeriodicSaves

HELD_SEC, EVERY_SEC, URL = 0.3, 0.01, "/tmp/rows"


class FailingSaves:
    """Saves that hold the jobs for a while and fail, as a cut does that waits in vain."""

    def __init__(self, error: SparserowError) -> None:
        self.error, self.begun, self.ended = error, [], []
        self.failed_twice = asyncio.Event()

    async def begin(self, _request: pb.BeginSaveRequest) -> Any:
        now = asyncio.get_running_loop().time
        self.begun.append(now())
        await asyncio.sleep(HELD_SEC)
        self.ended.append(now())
        if len(self.ended) == 2:
            self.failed_twice.set()
        raise self.error


@pytest.mark.parametrize("error", [Unavailable("overtaken"), DeadlineExceeded("cut: waited for commits")])
def test_workers_have_as_much_time_as_a_failed_save_took(error: SparserowError) -> None:
    async def fail_twice() -> FailingSaves:
        saves = FailingSaves(error)
        cluster: Any = SimpleNamespace(row_saves={URL: {1: EVERY_SEC}}, row_configs={}, jobs=SimpleNamespace(jobs={1}))
        series = PeriodicSaves(cluster, saves, lambda: None)  # type: ignore[arg-type]
        series.go_on()
        await saves.failed_twice.wait()
        await series.close()
        return saves

    saves = asyncio.run(fail_twice())
    assert saves.begun[1] - saves.ended[0] >= 0.9 * HELD_SEC  # a sleep's lower bound, also on a slow machine
