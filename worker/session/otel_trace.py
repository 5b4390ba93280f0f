"""A session's spans for OpenTelemetry, and their ids on the way to the shards."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from opentelemetry import context as otel_context, trace as otel
from opentelemetry.trace import Span, SpanKind, Tracer

from ...cpp_ext import _client
from .session import Session
from .tracing import ThreadName


class OtelTrace:
    """What ``session.core.record`` takes: each step of training is a span, with those of its parts below it.

    A step's span begins where the step before it ended, and is a child of the span that is current then, if any. Its
    ids go with every pull to the shards, those of the span "push" with every commit; shards that have an exporter add
    spans of their own.

    Args:
        tracer: of OpenTelemetry.
        take_pulls: gives (begin, end, step, thread) of pulls since the last call, in nanoseconds of
            ``time.perf_counter_ns``; the session's.
    """

    is_recording = True

    def __init__(self, tracer: Tracer, take_pulls: Callable[[], list[tuple[int, int, int, int]]]) -> None:
        self._tracer, self._take_pulls = tracer, take_pulls
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._step: Span | None = None
        self._thread = 0

    def begin_step(self, step: int) -> None:
        """Begins the span of a step on the calling thread, which is the one that trains."""
        self._thread = threading.get_ident()
        self._step = self._tracer.start_span("step", attributes={"sparserow.step": step})
        _carry(self._step)

    def end_step(self, next_step: int) -> None:
        """Ends the step's span, with the pulls that there were, and begins the next one's."""
        span, self._step = self._step, None
        if span is not None:
            for begin, end, step, _ in self._take_pulls():
                self._child(span, "pull", begin, end, step)
            span.end()
        self.begin_step(next_step)

    @contextlib.contextmanager
    def span(self, name: str, *, step: int) -> Iterator[None]:
        """See :class:`Trace`; requests of the body, on this thread, carry the span's ids."""
        root = self._step
        parent = None if root is None else otel.set_span_in_context(root)
        kind = SpanKind.CLIENT if name == "push" else SpanKind.INTERNAL
        with self._tracer.start_as_current_span(
            name, context=parent, kind=kind, attributes={"sparserow.step": step}
        ) as span:
            _carry(span)
            try:
                yield
            finally:
                _carry(self._step if threading.get_ident() == self._thread else None)

    def add(self, name: str, begin_ns: int, end_ns: int, *, step: int, thread: ThreadName | None = None) -> None:
        """See :class:`Trace`."""
        del thread
        self._child(self._step, name, begin_ns, end_ns, step)

    def _child(self, parent: Span | None, name: str, begin_ns: int, end_ns: int, step: int) -> None:
        context = otel_context.get_current() if parent is None else otel.set_span_in_context(parent)
        kind = SpanKind.CLIENT if name == "pull" else SpanKind.INTERNAL
        span = self._tracer.start_span(
            name,
            context=context,
            kind=kind,
            start_time=begin_ns + self._epoch_ns,
            attributes={"sparserow.step": step},
        )
        span.end(end_ns + self._epoch_ns)


def _carry(span: Span | None) -> None:
    """Requests of this thread belong to the span, if it is sampled."""
    context = None if span is None else span.get_span_context()
    if context is None or not context.is_valid or not context.trace_flags.sampled:
        _client.set_trace()
        return
    _client.set_trace(context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big"))


def record_otel(session: Session, tracer: Tracer) -> OtelTrace:
    """Has a session's steps, pulls and pushes become spans from now on; call it on the thread that trains.

    Args:
        session: whose.
        tracer: of OpenTelemetry, such as ``opentelemetry.trace.get_tracer("training")``.
    """
    trace = OtelTrace(tracer, session.core.native.take_pull_spans)
    session.core.record(trace)
    trace.begin_step(session.current_step)
    return trace
