"""Builds the messages about a shard's load: request times, bytes, the hottest keys, tables, its SSD tier, staleness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...cpp_ext import _server
from ...proto import control_pb2 as pb

_MOST_HOT_KEYS = 20


def load_message(
    server: _server.Server,
    store: _server.Store,
    stats: dict[str, Any],
    up_sec: float,
    following: Sequence[pb.FollowerLoad] = (),
) -> pb.ShardLoad:
    """Returns the load of a shard for ``sparserow status``.

    Args:
        server, store: the data plane and the rows of the shard.
        stats: the present counters of the data plane.
        up_sec: the seconds since the start of the shard.
        following: what followers say of themselves.
    """
    samples, keys = server.hot_keys(_MOST_HOT_KEYS)
    return pb.ShardLoad(
        up_sec=up_sec,
        rows_pulled=stats["rows_pulled"],
        rows_applied=stats["rows_applied"],
        bytes_received=stats["bytes_received"] + stats["lane_received"],
        bytes_sent=stats["bytes_sent"] + stats["lane_sent"],
        refused=stats["frames_refused"],
        time_bounds_sec=[bound / 1e6 for bound in _server.REQUEST_BOUNDS_US],
        times=[
            pb.RequestTimes(kind=kind, requests=counts, sum_sec=seconds)
            for kind, (counts, seconds) in stats["request_times"].items()
        ],
        samples=samples,
        hot_keys=[pb.HotKey(table_id=table, key=key, count=count, error=error) for table, key, count, error in keys],
        followers=store.change_stats()["cursors"],
        following=following,
        pulls_waiting=stats["pulls_waiting"],
    )


def hottest_share(server: _server.Server) -> float:
    """Returns the share of the sampled keys that the hottest key has at least, in [0, 1]."""
    samples, keys = server.hot_keys(1)
    return float((keys[0][2] - keys[0][3]) / samples) if keys else 0.0


def table_messages(tables: Iterable[_server.TableStats], stats: dict[str, Any]) -> list[pb.TableUsage]:
    """Returns what each table takes, and the staleness of its pulls.

    Args:
        tables: the rows and bytes of each table.
        stats: the present counters of the data plane.
    """
    return [
        pb.TableUsage(
            table_id=table.table_id,
            name=table.name,
            rows=table.rows,
            row_bytes=table.row_bytes,
            total_bytes=table.total_bytes,
            ssd_rows=table.ssd_rows,
            ssd_bytes=table.ssd_bytes,
            refused=table.refused,
            filter_bytes=table.filter_bytes,
            filter_error_rate=table.filter_error_rate,
            filter_entries=table.filter_entries,
            swept_rows=table.swept_rows,
            staleness=staleness_buckets(stats["staleness"].get(table.table_id)),
            rows_added=table.rows_added,
            rows_evicted=table.rows_evicted,
            ages_steps=_without_end(table.ages_steps),
            ages_seconds=_without_end(table.ages_seconds),
        )
        for table in tables
    ]


def _without_end(counts: list[int]) -> list[int]:
    """Returns the counts up to the last one that is not 0."""
    return counts[: max((i + 1 for i, count in enumerate(counts) if count), default=0)]


def tier_message(stats: dict[str, int | float] | None) -> pb.TierUsage | None:
    """Returns the message for ``Store.tier_stats``; None without an SSD."""
    if stats is None:
        return None
    return pb.TierUsage(
        hits=int(stats["hits"]),
        misses=int(stats["misses"]),
        rows_evicted=int(stats["rows_evicted"]),
        brought_ahead=int(stats["brought_ahead"]),
        file_bytes=int(stats["ssd_file_bytes"]),
        memory_bytes=int(stats["ssd_memory_bytes"]),
        reads=int(stats["ssd_reads"]),
        read_sec=stats["ssd_read_seconds"],
        rows_read=int(stats["ssd_rows_read"]),
        rows_waited=int(stats["ssd_rows_waited"]),
        bytes_read=int(stats["ssd_bytes_read"]),
        writes=int(stats["ssd_writes"]),
        write_sec=stats["ssd_write_seconds"],
        rows_written=int(stats["ssd_rows_written"]),
        bytes_written=int(stats["ssd_bytes_written"]),
    )


def staleness_buckets(counted: tuple[list[int], int] | None) -> list[pb.StalenessBucket]:
    """Returns the pulls of a table by staleness, as (bound, number) buckets; [] before the first pull."""
    bounds = [*_server.STALENESS_BOUNDS, 2**64 - 1]
    pulls = [] if counted is None else counted[0]
    return [pb.StalenessBucket(at_most=bound, pulls=count) for bound, count in zip(bounds, pulls, strict=False)]
