"""Refused requests in the log of a shard: a few of each peer and kind, so that no peer fills it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from sparserow.ps_server.shard.request_reporter import RequestReporter


class Server:
    """A native server with these refused requests."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def keep_spans(self, wanted: bool) -> None:
        assert not wanted

    def take_requests(self) -> tuple[list[dict[str, Any]], int]:
        taken, self.events = self.events, []
        return taken, 0


def event(peer: str, kind: str, code: int, request: int) -> dict[str, Any]:
    numbers = dict.fromkeys(("job", "worker", "epoch", "step"), 0)
    named = {
        "request": request,
        "type": kind,
        "peer": peer,
        "code": code,
        "message": "token: no",
        "trace_id": bytes(16),
    }
    return {**numbers, **named}


def test_refused_requests_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    reporter = RequestReporter(server, 0, None)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        server.events = [event(f"10.0.0.1:{port}", "PULL", 12, port) for port in range(4000)]
        server.events += [event("10.0.0.1:1", "PUSH", 12, 1), event("10.0.0.2:1", "PULL", 12, 1)]
        server.events += [event("10.0.0.1:1", "PULL", 3, 1)]
        reporter.stop()
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("refused PULL, ") and "PermissionDenied" in line for line in lines) == 5 + 1
    assert sum("PUSH" in line for line in lines) == 1
    assert sum("FailedPrecondition" in line for line in lines) == 1
