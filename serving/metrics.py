"""The Prometheus metrics of a serving process, which are read at each scrape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..cpp_ext import _server
from ..proto.process.request_histogram import request_histogram
from .live_sync import FRESHNESS_SEC
from .versions import ServedModels


class ServingMetrics(Collector):
    """A Prometheus collector of rows, lookups, live sync and freshness.

    Args:
        models: the versions that this process serves.
        server: the native server of the data plane.
    """

    def __init__(self, models: ServedModels, server: _server.Server) -> None:
        self._models = models
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their values at this moment."""
        stats = self._server.stats()
        yield CounterMetricFamily(
            "sparserow_serving_rows", "Rows looked up over the data plane (count).", value=stats["rows_pulled"]
        )
        yield CounterMetricFamily(
            "sparserow_serving_requests", "Frames received by the data plane (count).", value=stats["frames_received"]
        )
        yield CounterMetricFamily(
            "sparserow_serving_refused", "Frames refused by the data plane (count).", value=stats["frames_refused"]
        )
        yield GaugeMetricFamily(
            "sparserow_serving_lane_bytes",
            "Memory of clients of the same host that is mapped now, so that replies are written there (bytes).",
            stats["lane_bytes"],
        )
        yield request_histogram("sparserow_serving_request_seconds", stats["request_times"], _server.REQUEST_BOUNDS_US)
        yield GaugeMetricFamily(
            "sparserow_serving_ready",
            "Whether every slot of what is served is complete (0 or 1).",
            float(self._models.is_ready),
        )
        labels = ("model", "version")
        rows = GaugeMetricFamily("sparserow_serving_held_rows", "Rows of a version (count).", labels=labels)
        on_ssd = GaugeMetricFamily(
            "sparserow_serving_ssd_rows", "Rows of a version that are on the SSD alone (count).", labels=labels
        )
        used = GaugeMetricFamily(
            "sparserow_serving_bytes", "Memory of a version's rows and indexes (bytes).", labels=labels
        )
        reserved = GaugeMetricFamily(
            "sparserow_serving_reserved_bytes",
            "Pages touched ahead that no row of a version has used yet (bytes).",
            labels=labels,
        )
        behind = GaugeMetricFamily(
            "sparserow_serving_sync_behind_seconds",
            "Time since a version last had everything of training (seconds).",
            labels=labels,
        )
        synced = CounterMetricFamily(
            "sparserow_serving_synced_rows", "Rows that live sync changed or erased (count).", labels=labels
        )
        freshness = HistogramMetricFamily(
            "sparserow_serving_freshness_seconds",
            "Age of the oldest change of each slot that live sync brought, when it became visible, since the process "
            "caught up for the first time (seconds).",
            labels=labels,
        )
        for (model, version), served in self._models.book().versions.items():
            named = (model, str(version))
            tables = served.loaded.store.stats()
            rows.add_metric(named, sum(table.rows for table in tables))
            on_ssd.add_metric(named, sum(table.ssd_rows for table in tables))
            used.add_metric(named, served.loaded.store.used_bytes)
            reserved.add_metric(named, served.loaded.store.reserved_bytes)
            if served.follower is None:
                continue
            sync = served.follower.stats()
            if not served.follower.is_paused:
                behind.add_metric(named, served.follower.behind_sec)
            synced.add_metric(named, sync.rows + sync.erased)
            bounds = [*map(str, FRESHNESS_SEC), "+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(map(float, sync.freshness)), strict=True))
            freshness.add_metric(named, buckets, sync.freshness_sum_sec)
        yield from (rows, on_ssd, used, reserved, behind, synced, freshness)
