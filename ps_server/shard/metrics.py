"""The metrics of a parameter server, read from its native counters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...cpp_ext import _server
from ...proto.process.request_histogram import request_histogram
from ...proto.schema import SWEEP_RULES
from .engine import ShardEngine

# Each line maps a native counter to a metric, and has one sentence with its unit.
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("connections_total", "sparserow_ps_connections", "Connections accepted since the start (count)."),
    ("frames_received", "sparserow_ps_frames_received", "Frames received (count)."),
    ("frames_refused", "sparserow_ps_frames_refused", "Frames answered with an error (count)."),
    ("access_refused", "sparserow_ps_access_refused", "Frames refused because of their token (count)."),
    (
        "connections_too_slow",
        "sparserow_ps_connections_too_slow",
        "Connections closed because a frame or a reply moved too slowly (count).",
    ),
    ("bytes_received", "sparserow_ps_received_bytes", "Bytes received on the data plane (bytes)."),
    ("bytes_sent", "sparserow_ps_sent_bytes", "Bytes sent on the data plane (bytes)."),
    (
        "lane_received",
        "sparserow_ps_lane_received_bytes",
        "Bytes of pushed rows that were read from the memory of clients of the same host (bytes).",
    ),
    (
        "lane_sent",
        "sparserow_ps_lane_sent_bytes",
        "Bytes of rows and replies that were written into the memory of clients of the same host (bytes).",
    ),
    ("rows_pulled", "sparserow_ps_rows_pulled", "Rows sent in answers to pulls (count)."),
    ("rows_written", "sparserow_ps_rows_written", "Rows set or deleted without an optimizer (count)."),
    ("hinted_keys", "sparserow_ps_hinted_keys", "Keys that hints of later batches named (count)."),
    (
        "hinted_keys_dropped",
        "sparserow_ps_hinted_keys_dropped",
        "Keys of hints that were dropped because too many were waiting (count).",
    ),
    (
        "hinted_keys_declined",
        "sparserow_ps_hinted_keys_declined",
        "Keys of hints that were declined because reads did not wait for the disk (count).",
    ),
    ("rows_applied", "sparserow_ps_rows_applied", "Rows that commits have updated (count)."),
    ("commits_accepted", "sparserow_ps_commits_accepted", "Commits accepted (count)."),
    ("commits_duplicate", "sparserow_ps_commits_duplicate", "Commits sent again and answered from memory (count)."),
    ("commits_refused", "sparserow_ps_commits_refused", "Commits refused before anything was applied (count)."),
    (
        "commits_outside",
        "sparserow_ps_commits_outside_quorum",
        "Commits refused because their step had its quorum without the worker (count).",
    ),
    ("commits_fenced", "sparserow_ps_commits_fenced", "Commits refused because their epoch is over (count)."),
    ("steps_reduced", "sparserow_ps_steps_reduced", "Steps whose commits were summed and applied once (count)."),
    ("pulls_clocked", "sparserow_ps_pulls_clocked", "Pulls that named a step (count)."),
    ("pulls_parked", "sparserow_ps_pulls_parked", "Pulls that had to wait for the clock (count)."),
    ("staleness_sum", "sparserow_ps_pull_staleness", "Staleness of all pulls that named a step (steps)."),
)
_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("connections_open", "sparserow_ps_connections_open", "Connections open now (count)."),
    ("connections_local", "sparserow_ps_connections_local", "Of these, connections by Unix sockets (count)."),
    ("requests_active", "sparserow_ps_requests_active", "Requests under way now (count)."),
    ("pulls_waiting", "sparserow_ps_pulls_waiting", "Pulls that wait for the clock now (count)."),
    ("inflight_bytes", "sparserow_ps_inflight_bytes", "Bytes of request bodies held now (bytes)."),
    ("reply_bytes", "sparserow_ps_reply_bytes", "Bytes of replies being made or sent now (bytes)."),
    (
        "lane_bytes",
        "sparserow_ps_lane_bytes",
        "Memory of clients of the same host that is mapped now, so that rows are written and read there (bytes).",
    ),
    ("kept_bytes", "sparserow_ps_kept_bytes", "Bytes of commits that are kept for their step now (bytes)."),
    ("staleness_max", "sparserow_ps_pull_staleness_max", "Largest staleness of a pull since the start (steps)."),
)


# Only a shard with an SSD has these metrics.
_TIER_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("hits", "sparserow_ps_tier_hits", "Keys of pulls and commits whose rows were in memory (count)."),
    ("misses", "sparserow_ps_tier_misses", "Keys of pulls and commits that were looked for on the SSD (count)."),
    ("brought_ahead", "sparserow_ps_tier_keys_ahead", "Keys of hints that were looked for on the SSD (count)."),
    ("rows_evicted", "sparserow_ps_tier_rows_evicted", "Rows that left memory for the SSD (count)."),
    (
        "evicted_ahead",
        "sparserow_ps_tier_rows_evicted_ahead",
        "Rows that left memory before their room was needed (count).",
    ),
    ("ssd_rows_read", "sparserow_ps_ssd_rows_read", "Rows read from the SSD (count)."),
    (
        "ssd_rows_waited",
        "sparserow_ps_ssd_rows_waited",
        "Rows read from the SSD that the disk had to be asked for, because no cache had them (count).",
    ),
    (
        "ssd_rows_absent",
        "sparserow_ps_ssd_rows_absent",
        "Keys that were looked for on the SSD and are not there (count).",
    ),
    ("ssd_rows_written", "sparserow_ps_ssd_rows_written", "Rows written to the SSD or deleted there (count)."),
    ("ssd_bytes_read", "sparserow_ps_ssd_read_bytes", "Bytes of rows read from the SSD (bytes)."),
    (
        "ssd_disk_bytes_read",
        "sparserow_ps_ssd_disk_read_bytes",
        "Bytes that reads of rows took from the disk, because no cache had them (bytes).",
    ),
    ("ssd_bytes_written", "sparserow_ps_ssd_written_bytes", "Bytes of rows written to the SSD (bytes)."),
    (
        "ssd_disk_bytes_written",
        "sparserow_ps_ssd_disk_written_bytes",
        "Bytes that the engine pages wrote to the disk, copies of rows that stay included; 0 with rocksdb (bytes).",
    ),
    ("ssd_reads", "sparserow_ps_ssd_reads", "Batches of rows read from the SSD (count)."),
    ("ssd_read_seconds", "sparserow_ps_ssd_read_seconds", "Time of all batches read from the SSD (seconds)."),
    ("ssd_writes", "sparserow_ps_ssd_writes", "Batches of rows written to the SSD (count)."),
    ("ssd_write_seconds", "sparserow_ps_ssd_write_seconds", "Time of all batches written to the SSD (seconds)."),
)
_TIER_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("ssd_file_bytes", "sparserow_ps_ssd_file_bytes", "Files on the SSD (bytes)."),
    (
        "ssd_garbage_bytes",
        "sparserow_ps_ssd_garbage_bytes",
        "Part of the files on the SSD that is known to be outdated images of rows (bytes).",
    ),
    ("ssd_memory_bytes", "sparserow_ps_ssd_memory_bytes", "Memory of the SSD's filters, indexes and buffers (bytes)."),
    (
        "ssd_index_bytes",
        "sparserow_ps_ssd_index_bytes",
        "Part of the SSD's memory that counts against the memory budget: the index of the engine pages (bytes).",
    ),
    (
        "ssd_background_jobs",
        "sparserow_ps_ssd_background_jobs",
        "Flushes and compactions of the SSD's engine that run or are wanted (count).",
    ),
)


class ShardMetrics(Collector):
    """Collects the metrics of an engine in the thread of the metrics server; the native counters are thread-safe.

    Args:
        engine: the rows and the data plane.
        shard: the number of the shard.
        tokens_refused: returns how many heartbeats the coordinator has refused for the sake of their token.
    """

    def __init__(self, engine: ShardEngine, shard: int, tokens_refused: Callable[[], int] = int) -> None:
        self._engine = engine
        self._shard = str(shard)
        self._tokens_refused = tokens_refused

    def collect(self) -> Iterator[Metric]:
        """Yields the values of all metrics at this moment, each with the label ``shard``."""
        stats = self._engine.stats()
        for key, name, sentence in _COUNTERS:
            counter = CounterMetricFamily(name, sentence, labels=["shard"])
            counter.add_metric([self._shard], stats[key])
            yield counter
        refused = CounterMetricFamily(
            "sparserow_ps_tokens_refused",
            "Heartbeats that the coordinator refused because of this server's token (count).",
            labels=["shard"],
        )
        refused.add_metric([self._shard], self._tokens_refused())
        yield refused
        for key, name, sentence in _GAUGES:
            yield self._gauge(name, sentence, stats[key])
        yield self._gauge("sparserow_ps_used_bytes", "Memory of rows and indexes (bytes).", self._engine.used_bytes)
        yield self._gauge(
            "sparserow_ps_reserved_bytes",
            "Pages touched ahead that no row has used yet; they go first when rows need the budget (bytes).",
            self._engine.reserved_bytes,
        )
        yield self._gauge(
            "sparserow_ps_budget_bytes",
            "Memory budget of rows and indexes, 0 when there is none (bytes).",
            self._engine.memory_budget_bytes,
        )
        rows = GaugeMetricFamily("sparserow_ps_table_rows", "Rows of a table (count).", labels=["shard", "table"])
        size = GaugeMetricFamily(
            "sparserow_ps_table_bytes", "Memory of a table, with headers and index (bytes).", labels=["shard", "table"]
        )
        added = CounterMetricFamily(
            "sparserow_ps_table_added_rows",
            "Rows that a table did not have before, by pushes and restores (count).",
            labels=["shard", "table"],
        )
        evicted = CounterMetricFamily(
            "sparserow_ps_table_evicted_rows",
            "Rows of a table that left memory for the SSD (count).",
            labels=["shard", "table"],
        )
        ssd_rows = GaugeMetricFamily(
            "sparserow_ps_table_ssd_rows",
            "Rows of a table that are on the SSD alone (count).",
            labels=["shard", "table"],
        )
        tables = self._engine.table_stats()
        for table in tables:
            rows.add_metric([self._shard, table.name], table.rows)
            size.add_metric([self._shard, table.name], table.total_bytes)
            ssd_rows.add_metric([self._shard, table.name], table.ssd_rows)
            added.add_metric([self._shard, table.name], table.rows_added)
            evicted.add_metric([self._shard, table.name], table.rows_evicted)
        yield from (rows, size, added)
        yield from self._policies(tables)
        tier = self._engine.tier_stats()
        if tier is not None:
            yield from (ssd_rows, evicted)
            yield from self._tier(tier)
        yield self._staleness(stats["staleness"])
        yield request_histogram(
            "sparserow_ps_request_seconds",
            stats["request_times"],
            _server.REQUEST_BOUNDS_US,
            {"shard": self._shard},
        )
        yield self._gauge(
            "sparserow_ps_hottest_key_share",
            "Share of the sampled keys that is the hottest key (0 to 1).",
            self._engine.hottest_share(),
        )
        yield self._gauge(
            "sparserow_ps_followers",
            "Serving processes that follow this shard's changes (count).",
            self._engine.store.change_stats()["cursors"],
        )

    def _policies(self, tables: list[_server.TableStats]) -> Iterator[Metric]:
        """Yields the metrics of admission and sweeps for every table, so that a query finds them before the first
        event.
        """
        labels = ["shard", "table"]
        refused = CounterMetricFamily(
            "sparserow_ps_table_refused_pushes",
            "Pushes of keys without a row that the table's policy gave none (count).",
            labels=labels,
        )
        swept = CounterMetricFamily(
            "sparserow_ps_table_swept_rows", "Rows that sweeps removed, by rule (count).", labels=[*labels, "rule"]
        )
        gauges = {
            "filter_entries": GaugeMetricFamily(
                "sparserow_ps_table_filter_keys", "Keys without a row that the filters count (count).", labels=labels
            ),
            "filter_bytes": GaugeMetricFamily(
                "sparserow_ps_table_filter_bytes", "Memory of the filters that admit keys (bytes).", labels=labels
            ),
            "filter_error_rate": GaugeMetricFamily(
                "sparserow_ps_table_filter_error_rate",
                "Estimated probability that the filters mistake a new key for another key (probability).",
                labels=labels,
            ),
            "sweep_longest_hold_seconds": GaugeMetricFamily(
                "sparserow_ps_table_sweep_longest_hold_seconds",
                "Longest time that a sweep blocked access to rows since the start (seconds).",
                labels=labels,
            ),
        }
        for table in tables:
            of_table = [self._shard, table.name]
            refused.add_metric(of_table, table.refused)
            for rule, rows in zip(SWEEP_RULES, table.swept_rows, strict=True):
                swept.add_metric([*of_table, rule], rows)
            for name, gauge in gauges.items():
                gauge.add_metric(of_table, getattr(table, name))
        yield from (refused, swept, *gauges.values())

    def _tier(self, stats: dict[str, int | float]) -> Iterator[Metric]:
        for key, name, sentence in _TIER_COUNTERS:
            counter = CounterMetricFamily(name, sentence, labels=["shard"])
            counter.add_metric([self._shard], stats[key])
            yield counter
        for key, name, sentence in _TIER_GAUGES:
            yield self._gauge(name, sentence, stats[key])

    def _staleness(self, counted: dict[int, tuple[list[int], int]]) -> Metric:
        histogram = HistogramMetricFamily(
            "sparserow_ps_table_pull_staleness",
            "Steps by which a pull that named a step lagged behind the step before it (steps).",
            labels=["shard", "table"],
        )
        bounds = [*map(str, _server.STALENESS_BOUNDS), "+Inf"]
        for table in self._engine.table_stats():
            if table.table_id in counted:
                pulls, total = counted[table.table_id]
                cumulative = list(zip(bounds, itertools.accumulate(pulls), strict=True))
                histogram.add_metric([self._shard, table.name], cumulative, total)
        return histogram

    def _gauge(self, name: str, sentence: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, sentence, labels=["shard"])
        gauge.add_metric([self._shard], value)
        return gauge
