"""Exports a session's counters to Prometheus, in a process that has a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .session import JobSession
from .session_stats import SessionStats


class SessionMetrics(Collector):
    """A Prometheus collector of a session's counters, which are read at each scrape.

    Register it with ``prometheus_client.REGISTRY.register(sr.SessionMetrics(session))``.

    Args:
        session: the session to read; its namespace and rank are the labels of each metric.
    """

    def __init__(self, session: JobSession) -> None:
        self._session = session

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their values at this moment."""
        stats, labels = self._session.stats(), [self._session.namespace, str(self._session.rank)]
        gauges = SessionStats.gauges()
        for name, text in SessionStats.describe().items():
            kind = GaugeMetricFamily if name in gauges else CounterMetricFamily
            family = kind(f"sparserow_session_{name}", text, labels=["namespace", "rank"])
            family.add_metric(labels, getattr(stats, name))
            yield family
        step = GaugeMetricFamily(
            "sparserow_session_step", "The step that the next commit ends (number).", labels=["namespace", "rank"]
        )
        step.add_metric(labels, self._session.current_step)
        yield step
