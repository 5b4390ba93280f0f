"""A session's counters for Prometheus, in a process that has a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .session import Session

# The fields of SessionStats, each with a sentence and its unit.
_HELP = {
    "steps_committed": "Steps committed (count).",
    "steps_aborted": "Steps that no worker took (count).",
    "rows_pulled": "Unique rows that came from the shards (count).",
    "rows_pushed": "Unique rows whose gradients went to the shards (count).",
    "pulls": "Calls for rows (count).",
    "pulls_merged": "Calls for rows that served all lookups of a forward at once (count).",
    "lookups_missed": "Lookups that had to pull although a merged pull or a prefetch went before (count).",
    "nonfinite_rows": "Summed gradients of rows with NaN or Inf (count).",
    "clipped_rows": "Summed gradients of rows that were shortened (count).",
    "rows_prefetched": "Unique rows that were pulled before their step began (count).",
    "rows_hinted": "Unique rows that shards were told of before they were pulled (count).",
    "rows_deferred": "Rows of exact prefetch that were left for their step (count).",
    "rows_revalidated": "Prefetched rows that were asked about again at their step (count).",
    "rows_refreshed": "Prefetched rows that had changed and were sent again (count).",
    "bytes_refreshed": "Float32 weights of prefetched rows that were sent again (bytes).",
    "cache_hits": "Unique rows that steps took from the row cache without asking (count).",
    "cache_misses": "Unique rows that steps looked for in the row cache and that were not there (count).",
    "cache_revalidated": "Unique rows of the row cache that were asked about by version (count).",
    "cache_refreshed": "Of the rows asked about, those that had changed and were sent again (count).",
    "cache_bytes_saved": "Float32 weights of hits and of rows asked about that had not changed (bytes).",
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
        for name, text in _HELP.items():
            family = CounterMetricFamily(f"sparserow_session_{name}", text, labels=["namespace", "rank"])
            family.add_metric(labels, getattr(stats, name))
            yield family
        step = GaugeMetricFamily(
            "sparserow_session_step", "The step that the next commit ends (number).", labels=["namespace", "rank"]
        )
        step.add_metric(labels, self._session.current_step)
        yield step
