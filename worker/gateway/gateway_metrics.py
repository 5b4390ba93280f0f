"""The Prometheus metrics of a gateway."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...proto.errors import Internal, SparserowError


class GatewayMetrics(Collector):
    """Counts the calls of each method with their times, rows and errors. Thread-safe.

    Attributes:
        clients: the number of clients that the gateway knows now, which the gateway sets.
        namespaces: the number of namespaces to which it is connected now, which the gateway sets.
    """

    def __init__(self) -> None:
        self.clients = 0
        self.namespaces = 0
        self._times = Histogram(
            "sparserow_gateway_request_seconds",
            "How long calls took in the gateway, the shards' answers included (seconds).",
            labelnames=["method"],
            registry=None,
        )
        self._rows = Counter(
            "sparserow_gateway_rows", "Rows pulled or pushed (count).", labelnames=["method"], registry=None
        )
        self._errors = Counter(
            "sparserow_gateway_errors",
            "Calls that ended with an error (count).",
            labelnames=["method", "code"],
            registry=None,
        )
        self._repeated = Counter(
            "sparserow_gateway_pushes_repeated",
            "Pushes that were sent again and answered without applying them again (count).",
            registry=None,
        )

    @contextlib.contextmanager
    def call(self, method: str, rows: int) -> Iterator[None]:
        """Counts the body as one call of ``method``.

        Args:
            method: the name of the method.
            rows: the number of rows in the call.
        """
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            code = error.code if isinstance(error, SparserowError) else Internal.code
            self._errors.labels(method, code).inc()
            raise
        else:
            self._rows.labels(method).inc(rows)
        finally:
            self._times.labels(method).observe(time.perf_counter() - began)

    def repeated(self) -> None:
        """Counts a push that was sent again after it had been applied."""
        self._repeated.inc()

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their values at this moment."""
        for metric in (self._times, self._rows, self._errors, self._repeated):
            yield from metric.collect()
        yield GaugeMetricFamily("sparserow_gateway_clients", "Clients that have pushed (count).", self.clients)
        yield GaugeMetricFamily(
            "sparserow_gateway_namespaces", "Namespaces that the gateway is a worker of now (count).", self.namespaces
        )
