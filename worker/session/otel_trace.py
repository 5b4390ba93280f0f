"""Sends a session's spans to OpenTelemetry, and their ids with each request to the shards.

OpenTelemetry is of the extra ``otel``. Whoever has a tracer has it, so it is imported where there is one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ...cpp_ext import _client
from .session import JobSession
from .tracing import ThreadName

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


class OtelTrace:
    """A trace for ``session.core.record``: each training step is a span, and its parts are child spans.

    A step's span begins where the step before it ended. It is a child of the span that is current then, if any.
    Every pull carries the ids of the step's span to the shards; every commit carries those of the span "push". Shards
    that have an exporter add spans of their own.

    Args:
        tracer: the tracer of OpenTelemetry that creates the spans.
        take_pulls: returns (begin, end, step, thread) of the session's pulls since the last call. Times are in
            nanoseconds of ``time.perf_counter_ns``; thread is the operating system's thread id.
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
        """Adds the step's pulls as child spans, ends the step's span and begins that of ``next_step``."""
        span, self._step = self._step, None
        if span is not None:
            for begin, end, step, _ in self._take_pulls():
                self._child(span, "pull", begin, end, step)
            span.end()
        self.begin_step(next_step)

    @contextlib.contextmanager
    def span(self, name: str, *, step: int) -> Iterator[None]:
        """Implements :meth:`Trace.span`; requests that the body makes on this thread carry the span's ids."""
        from opentelemetry import trace as otel

        root = self._step
        parent = None if root is None else otel.set_span_in_context(root)
        kind = otel.SpanKind.CLIENT if name == "push" else otel.SpanKind.INTERNAL
        with self._tracer.start_as_current_span(
            name, context=parent, kind=kind, attributes={"sparserow.step": step}
        ) as span:
            _carry(span)
            try:
                yield
            finally:
                _carry(self._step if threading.get_ident() == self._thread else None)

    def add(self, name: str, begin_ns: int, end_ns: int, *, step: int, thread: ThreadName | None = None) -> None:
        """Implements :meth:`Trace.add`; ``thread`` is not recorded."""
        del thread
        self._child(self._step, name, begin_ns, end_ns, step)

    def _child(self, parent: Span | None, name: str, begin_ns: int, end_ns: int, step: int) -> None:
        from opentelemetry import context as otel_context, trace as otel

        context = otel_context.get_current() if parent is None else otel.set_span_in_context(parent)
        kind = otel.SpanKind.CLIENT if name == "pull" else otel.SpanKind.INTERNAL
        span = self._tracer.start_span(
            name,
            context=context,
            kind=kind,
            start_time=begin_ns + self._epoch_ns,
            attributes={"sparserow.step": step},
        )
        span.end(end_ns + self._epoch_ns)


def _carry(span: Span | None) -> None:
    """Has this thread's requests carry the span's ids if the span is sampled, and no ids otherwise."""
    context = None if span is None else span.get_span_context()
    if context is None or not context.is_valid or not context.trace_flags.sampled:
        _client.set_trace()
        return
    _client.set_trace(context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big"))


def record_otel(session: JobSession, tracer: Tracer) -> OtelTrace:
    """Records a session's steps, pulls and pushes as spans from now on. The thread that trains calls it.

    Args:
        tracer: the tracer that creates the spans, such as ``opentelemetry.trace.get_tracer("training")``.

    Returns:
        The trace, which the session uses from now on.
    """
    trace = OtelTrace(tracer, session.core.native.take_pull_spans)
    session.core.record(trace)
    trace.begin_step(session.current_step)
    return trace
