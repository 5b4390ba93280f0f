"""Traces by OpenTelemetry, where the environment names a collector: made at the entry point of a process.

The SDK and its exporter are the extra ``otel``; nothing here imports them unless a collector is named.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .closing import Closing
from .errors import FailedPrecondition
from .extras import install_command

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FLUSH_MS = 5000


class Telemetry(Closing):
    """Gives spans to a collector until it is closed, which sends the last of them and takes at most 5 s.

    Args:
        provider: of OpenTelemetry's SDK.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.tracer: Tracer = provider.get_tracer("sparserow")

    def close(self) -> None:
        """Sends what is left. Idempotent."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def telemetry_from_environment(role: str) -> Telemetry | None:
    """What ``OTEL_EXPORTER_OTLP_ENDPOINT`` asks for; None when it is not set.

    Args:
        role: of the process, such as ``shard``; it is ``service.name`` unless ``OTEL_SERVICE_NAME`` says another one.

    Raises:
        FailedPrecondition: the extra is not installed.
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
