"""Reports requests of the data plane: refused requests as lines of the log, traced requests as spans."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ...cpp_ext import _server
from ...proto.errors import error_of
from ...proto.process.log_rate import RateLimit
from .periodic_thread import PeriodicThread

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)
log.addFilter(RateLimit())  # peers cause these lines

_EVERY_SEC = 0.5


class RequestReporter:
    """Takes events from the native server twice a second, in a thread of its own.

    Args:
        server: the data-plane server.
        shard: the index of the shard.
        tracer: receives the spans; None keeps no spans.
    """

    def __init__(self, server: _server.Server, shard: int, tracer: Tracer | None) -> None:
        self._server, self._shard, self._tracer = server, shard, tracer
        server.keep_spans(tracer is not None)
        self._thread = PeriodicThread(self.report, _EVERY_SEC, name="request-reporter")

    def report(self) -> None:
        """Logs and exports the events since the last call."""
        events, dropped = self._server.take_requests()
        for event in events:
            if event["code"]:
                self._log(event)
            if self._tracer is not None and any(event["trace_id"]):
                self._export(self._tracer, event)
        if dropped:
            log.warning(
                "%d further refused or traced requests are not reported, because the buffer was full",
                dropped,
                extra={"dropped": dropped},
            )

    def stop(self) -> None:
        """Stops the thread and reports the remaining events."""
        self._thread.stop()
        self.report()

    def _log(self, event: dict[str, Any]) -> None:
        error = error_of(event["code"], event["message"])
        who = f"request {event['request']} of worker {event['worker']} of job {event['job']}"
        fields = {name: event[name] for name in ("request", "type", "job", "worker", "epoch", "step", "peer")}
        if any(event["trace_id"]):
            fields["trace_id"] = event["trace_id"].hex()
        fields |= {"code": error.code, "error": event["message"]}
        level = logging.DEBUG if error.retryable else logging.INFO
        kind = (str(event["peer"]).rpartition(":")[0], event["type"], error.code)
        extra = {"fields": fields, "kind": kind}
        log.log(level, "refused %s, %s: %s: %s", event["type"], who, error.code, error, extra=extra)

    def _export(self, tracer: Tracer, event: dict[str, Any]) -> None:
        from opentelemetry import trace as otel
        from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

        parent = SpanContext(
            int.from_bytes(event["trace_id"], "big"),
            int.from_bytes(event["span_id"], "big"),
            is_remote=True,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )
        span = tracer.start_span(
            f"shard {event['type']}",
            context=otel.set_span_in_context(NonRecordingSpan(parent)),
            kind=SpanKind.SERVER,
            start_time=event["begin_unix_ns"],
            attributes={
                "sparserow.shard": self._shard,
                "sparserow.request": event["request"],
                "sparserow.worker": event["worker"],
                "sparserow.step": event["step"],
            },
        )
        if event["code"]:
            span.set_status(Status(StatusCode.ERROR, event["message"]))
        span.end(event["end_unix_ns"])
