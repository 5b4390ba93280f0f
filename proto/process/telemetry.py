"""Sends traces with OpenTelemetry when the environment names a collector; the entry point of a process sets it up.

The SDK and its exporter are in the extra ``otel``. This module imports them only when a collector is named.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..closing import Closing
from ..errors import FailedPrecondition
from ..extras import install_command

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FLUSH_MS = 5000


class Telemetry(Closing):
    """Sends spans to a collector until it is closed.

    Args:
        provider: the tracer provider of OpenTelemetry's SDK.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.tracer: Tracer = provider.get_tracer("sparserow")

    def close(self) -> None:
        """Sends the remaining spans, which takes at most 5 s. A second call does nothing."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def telemetry_from_environment(role: str) -> Telemetry | None:
    """Returns the exporter that ``OTEL_EXPORTER_OTLP_ENDPOINT`` asks for; None when the variable is not set.

    Args:
        role: the role of the process, such as ``shard``. ``service.name`` is made of it unless ``OTEL_SERVICE_NAME`` is
            set.

    Raises:
        FailedPrecondition: the extra ``otel`` is not installed.
    """
    named = next((name for name in _VARIABLES if os.environ.get(name)), None)
    if named is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise FailedPrecondition(
            f"{named} is set: traces need {error.name}; {install_command('otel')}, or unset it"
        ) from None
    name = os.environ.get("OTEL_SERVICE_NAME") or f"sparserow-{role}"
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Telemetry(provider)
