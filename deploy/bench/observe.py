"""``bench observe``: measures what metrics and traces cost a training step.

The model of ``bench train`` runs three times, each over a coordinator and one shard of its own. The three take turns on
new batches. The first observes nothing (``sparserow ps --no-observe``, no page). The second has metrics (request times,
hot keys, a page). The third adds traces of the worker's steps and of every request of the shard, sent to a collector
that drops them. CPU is that of the worker's process and the shard, over the measured steps. What a thread of the
exporter does during the turn of another contender counts for that contender.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from torch import Tensor

from ...proto.errors import Internal
from ...proto.extras import install_command
from ...proto.process.telemetry import telemetry_from_environment
from ...worker.api.connect import connect
from ...worker.api.session import Session
from ..launch.child_processes import first_line, stop
from ..launch.readiness import wait_until_ready
from .click_model import TABLES, CpuClock, Size as ModelSize, ZipfBatches, distributed_step
from .harness import Contender, Figure, median, process_cpu, time_in_turns
from .processes import other_process

LIMIT_OF_UNOBSERVED = 0.97
_START_SEC = 60.0
_STOP_SEC = 20.0
_LEASE_SEC = 120.0  # long, so that a busy machine ends no lease
_COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclass(frozen=True)
class Size:
    """The rows and lookups of each table, and the number of repeated steps."""

    rows: int = 100_000
    batch: int = 4096
    hot: int = 1
    repetitions: int = 150


FULL = Size()
QUICK = Size(rows=1_000, batch=64, hot=3, repetitions=3)


@dataclass(frozen=True)
class _BenchCluster:
    """The address of a cluster of one shard, and the shard's process."""

    address: str
    shard_pid: int


def run_observe(size: Size) -> list[Figure]:
    """Returns the samples/s of each of the three, as shares of the first, and the CPU per step."""
    model = ModelSize(size.rows, size.batch, (size.hot,), size.repetitions)
    with ExitStack() as stack:
        port = stack.enter_context(other_process(_collect, ()))
        page = "--metrics-port=0"
        places = {
            "nothing observed": stack.enter_context(_cluster("--no-observe")),
            "metrics": stack.enter_context(_cluster(page)),
            "metrics and traces": stack.enter_context(_cluster(page, collector=f"http://127.0.0.1:{port}")),
        }
        clocks = {name: (CpuClock(time.process_time), _shard_clock(place)) for name, place in places.items()}
        batches = ZipfBatches(model, size.hot)
        contenders = []
        for index, (name, place) in enumerate(places.items()):
            session = stack.enter_context(connect(place.address, f"observe-{index}"))
            if name == "metrics and traces":
                _trace(stack, session, port)
            contenders.append(_clocked(name, batches, model, session, clocks[name]))
        seconds = time_in_turns(contenders, repetitions=size.repetitions)
    figures = []
    rates = {name: size.batch / median(each) for name, each in zip(places, seconds, strict=True)}
    cpu = {name: sum(clock.mean_ms(size.repetitions) for clock in pair) for name, pair in clocks.items()}
    first = "nothing observed"
    for name in places:
        title = f"observe {size.hot}-hot, {TABLES} tables, batch {size.batch}: {name}"
        is_first = name == first
        limit, ratio = (None, None) if is_first else (LIMIT_OF_UNOBSERVED, rates[name] / rates[first])
        figures.append(Figure(title, rates[name], "samples/s", limit, ratio))
        cpu_ratio = None if is_first else cpu[name] / cpu[first]
        figures.append(Figure(f"{title}: CPU", cpu[name], "ms/step", None, cpu_ratio, higher_is_better=False))
    return figures


def _clocked(
    name: str, batches: ZipfBatches, model: ModelSize, session: Session, clocks: tuple[CpuClock, CpuClock]
) -> Contender:
    step = distributed_step(model, session)

    def run(batch: tuple[Tensor, Tensor]) -> None:
        for clock in clocks:
            clock.start()
        step(batch)
        for clock in clocks:
            clock.stop()

    return Contender(name, batches.make, run)


def _shard_clock(place: _BenchCluster) -> CpuClock:
    return CpuClock(lambda: process_cpu(place.shard_pid))


def _trace(stack: ExitStack, session: Session, port: int) -> None:
    before = os.environ.get(_COLLECTOR)
    os.environ[_COLLECTOR] = f"http://127.0.0.1:{port}"
    try:
        telemetry = telemetry_from_environment("trainer")
    finally:
        if before is None:
            del os.environ[_COLLECTOR]
        else:
            os.environ[_COLLECTOR] = before
    assert telemetry is not None
    stack.enter_context(telemetry)

    session.record_otel(telemetry.tracer)


@contextmanager
def _cluster(*shard_options: str, collector: str | None = None) -> Iterator[_BenchCluster]:
    """Runs a coordinator and a shard as a user starts them; ``collector`` is the address for the shard's spans."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    if collector is not None:
        environment[_COLLECTOR] = collector
    with ExitStack() as stack:
        leases = (f"--worker-lease={_LEASE_SEC:.0f}s", f"--shard-lease={_LEASE_SEC:.0f}s")
        coordinator = stack.enter_context(_process(environment, "coordinator", "--shards=1", "--port=0", *leases))
        deadline = time.monotonic() + _START_SEC
        found = re.search(r"coordinator at (\S+),", first_line(coordinator, deadline, "bench observe: the coordinator"))
        if found is None:
            raise Internal("bench observe: the coordinator did not start; its messages are on stderr")
        options = ("--shard=0", "--port=0", f"--coordinator={found[1]}", *shard_options)
        shard = stack.enter_context(_process(environment, "ps", *options))
        wait_until_ready(found[1], _START_SEC)
        yield _BenchCluster(found[1], shard.pid)


@contextmanager
def _process(environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", f"{__package__.rsplit('.', 1)[0]}.cli", *arguments, "--log-level=warning"]
    command.append(f"--die-with-parent={os.getpid()}")
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        stop((process,), _STOP_SEC)


def _collect(pipe: Connection) -> None:
    """Runs an OpenTelemetry collector that accepts spans and drops them."""
    try:
        import grpc
        from opentelemetry.proto.collector.trace.v1 import (
            trace_service_pb2 as otlp,
            trace_service_pb2_grpc as otlp_grpc,
        )
    except ImportError as error:
        raise SystemExit(f"bench observe: needs {error.name}; {install_command('otel')}") from None

    class Collector(otlp_grpc.TraceServiceServicer):
        def Export(self, request: object, context: object) -> object:  # noqa: ARG002, N802 - gRPC's
            return otlp.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    with suppress(EOFError):
        pipe.recv()  # returns when the benchmark is done
    server.stop(None)
