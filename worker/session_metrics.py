"""A session's counters for Prometheus, in a process that has a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from .session import Session

_CACHE_HELP = {
    "hits": "Unique rows that steps took from the row cache without asking (count).",
    "misses": "Unique rows that steps looked for in the row cache and that were not there (count).",
    "revalidated": "Unique rows of the row cache that were asked about by version (count).",
    "refreshed": "Of the rows asked about, those that had changed and were sent again (count).",
    "bytes_saved": "Float32 weights of hits and of rows asked about that had not changed (bytes).",
}


class SessionMetrics(Collector):
    """``prometheus_client.REGISTRY.register(sr.SessionMetrics(session))``; read when it is asked for.

    Args:
        session: its namespace and rank are labels.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def collect(self) -> Iterator[Metric]:
        """All metrics at this moment."""
        stats, labels = self._session.stats(), [self._session.namespace, str(self._session.rank)]
        found = [
            ("steps_committed", "Steps committed (count).", stats.steps_committed),
            ("rows_pulled", "Unique rows that came from the shards (count).", stats.rows_pulled),
            ("rows_pushed", "Unique rows whose gradients went to the shards (count).", stats.rows_pushed),
        ]
        found += [(f"cache_{name}", _CACHE_HELP[name], value) for name, value in stats.cache().items()]
        for name, text, value in found:
            family = CounterMetricFamily(f"sparserow_session_{name}", text, labels=["namespace", "rank"])
            family.add_metric(labels, value)
            yield family
