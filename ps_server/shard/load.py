"""What a shard says of its load: request times, bytes, the keys asked for most."""

from __future__ import annotations

from typing import Any

from ...cpp_ext import _server
from ...proto import control_pb2 as pb

_MOST_HOT_KEYS = 20


def load_message(server: _server.Server, store: _server.Store, stats: dict[str, Any], up_sec: float) -> pb.ShardLoad:
    """For ``sparserow status``.

    Args:
        server, store: the shard's.
        stats: the server's, of now.
        up_sec: since the shard's start.
    """
    samples, keys = server.hot_keys(_MOST_HOT_KEYS)
    return pb.ShardLoad(
        up_sec=up_sec,
        rows_pulled=stats["rows_pulled"],
        rows_applied=stats["rows_applied"],
        bytes_received=stats["bytes_received"],
        bytes_sent=stats["bytes_sent"],
        refused=stats["frames_refused"],
        time_bounds_sec=[bound / 1e6 for bound in _server.REQUEST_BOUNDS_US],
        times=[
            pb.RequestTimes(kind=kind, requests=counts, sum_sec=seconds)
            for kind, (counts, seconds) in stats["request_times"].items()
        ],
        samples=samples,
        hot_keys=[pb.HotKey(table_id=table, key=key, count=count, error=error) for table, key, count, error in keys],
        followers=store.change_stats()["cursors"],
    )


def hottest_share(server: _server.Server) -> float:
    """How much of the sampled keys the hottest one surely is, in [0, 1]."""
    samples, keys = server.hot_keys(1)
    return float((keys[0][2] - keys[0][3]) / samples) if keys else 0.0
