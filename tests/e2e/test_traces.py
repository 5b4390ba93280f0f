"""Traces from a worker to its shards, and the log of refused requests: real processes, and a collector in the test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp, trace_service_pb2_grpc as otlp_grpc

import sparserow as sr
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import FailedPrecondition, InvalidArgument
from sparserow.proto.process.telemetry import telemetry_from_environment
from sparserow_process import Launcher, wait_until

DIM = 4


class Collector(otlp_grpc.TraceServiceServicer):
    """Keeps what is exported: spans by (service, name)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def Export(self, request: Any, context: Any) -> otlp.ExportTraceServiceResponse:  # noqa: ARG002 - gRPC's
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(named["service.name"], span) for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def named(self, service: str, name: str) -> list[Any]:
        return [span for whose, span in list(self.spans) if (whose, span.name) == (service, name)]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> Iterator[Collector]:
    made = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    settings = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_BSP_SCHEDULE_DELAY": "200",  # milliseconds
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
        launcher.environment[name] = value
    yield made
    server.stop(None)


def cluster_of(launcher: Launcher, *options: str) -> tuple[str, Any]:
    process = launcher.start("up", "--shards=2", "--port=0", *options)
    return process.wait_for(r"ready at (\S+:\d+)")[1], process


def test_a_step_is_a_trace_from_the_worker_to_the_shards(launcher: Launcher, collector: Collector) -> None:
    address, _ = cluster_of(launcher)
    telemetry = telemetry_from_environment("trainer")
    assert telemetry is not None
    with telemetry, sr.connect(address, "ads", staleness=0) as session:
        layer = session.distribute(_bag(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
        session.record_otel(telemetry.tracer)
        for _ in range(2):
            layer(_ids()).sum().backward()
            session.step()
    for service, name, count in (
        ("sparserow-trainer", "step", 2),
        ("sparserow-trainer", "session.step", 2),
        ("sparserow-shard", "shard COMMIT", 4),
        ("sparserow-shard", "shard PREPARE", 4),
        ("sparserow-shard", "shard PULL", 4),
    ):
        wait_until(lambda s=service, n=name, c=count: len(collector.named(s, n)) >= c, f"{count} spans {name}")
    steps = collector.named("sparserow-trainer", "step")
    assert len({span.trace_id for span in steps}) == 2
    own = {span.span_id: span for service, span in collector.spans if service == "sparserow-trainer"}
    by_id = {span.span_id: span.trace_id for span in steps}
    for name in ("session.step", "pull"):
        for span in collector.named("sparserow-trainer", name):
            assert by_id[span.parent_span_id] == span.trace_id, name
    for name, parent in (("shard PULL", "step"), ("shard PREPARE", "push"), ("shard COMMIT", "push")):
        spans = collector.named("sparserow-shard", name)
        assert {span.trace_id for span in spans} == {span.trace_id for span in steps}, name
        assert {own[span.parent_span_id].name for span in spans} == {parent}
        for span in spans:
            facts = {each.key: each.value.int_value for each in span.attributes}
            assert facts["sparserow.shard"] in (0, 1)
            assert span.start_time_unix_nano < span.end_time_unix_nano


def _bag() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.EmbeddingBag(1000, DIM, mode="sum"))


def _ids() -> Any:
    import torch

    return torch.arange(400).reshape(40, 10)


def test_a_refused_request_is_one_json_line_with_its_ids(launcher: Launcher) -> None:
    address, up = cluster_of(launcher, "--log-format=json", "--log-level=info")
    with ControlClient(address) as control, sr.connect(address, "ads", staleness=None) as session:
        session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=0.5))
        schema = control.list_tables("ads")[0]
        from sparserow.cpp_ext import _client

        view = control.cluster()
        client = _client.Client(
            shards=[(shard.host, shard.port) for shard in view.shards],
            slot_owner=np.ascontiguousarray(view.slot_owner),
            route_epoch=view.route_epoch,
            job_id=77,
            worker_id=5,
        )
        _client.set_trace(bytes(range(16)), bytes(range(8)))
        try:
            with pytest.raises(InvalidArgument, match="the request has dim 9"):
                client.pull(schema.id, np.arange(10, dtype=np.uint64), dim=9)
        finally:
            _client.set_trace()

    def lines() -> list[dict[str, Any]]:
        whole = [line for line in up.err.splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in map(json.loads, whole) if event.get("type") == "PULL"]

    wait_until(lines, "the line of the refused pull")
    event = lines()[0]
    assert (event["job"], event["worker"], event["step"], event["code"]) == (77, 5, -1, "InvalidArgument")
    assert event["request"] > 0
    assert event["peer"] == "127.0.0.1"  # a client that names no cluster does not look for its sockets
    assert event["message"].startswith(f"refused PULL, request {event['request']} of worker 5 of job 77")
    assert "trace_id" not in event  # nobody keeps spans there


def test_ids_of_another_length_are_refused() -> None:
    from sparserow.cpp_ext import _client

    with pytest.raises(InvalidArgument, match="trace_id, span_id: allowed: 16 and 8 bytes, or none"):
        _client.set_trace(b"1234", b"12345678")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert telemetry_from_environment("shard") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(FailedPrecondition, match=r"pip install 'opentelemetry-sdk>=.*, or unset it"):
        telemetry_from_environment("shard")
