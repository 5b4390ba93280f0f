"""A shard's engine in the process of a test, without a coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparserow.cpp_ext import _client, _server
from sparserow.proto.errors import error_of
from sparserow.ps_server.shard.coordinator_link import Registration
from sparserow.ps_server.shard.engine import EngineOptions, ShardEngine


@contextmanager
def lone_engine(*, slot_count: int, **options: Any) -> Iterator[ShardEngine]:
    """Shard 0 of cluster 1 on a free port of the loopback, for the duration of the block.

    Args:
        slot_count: of the cluster.
        options: of ``EngineOptions``; without any it has no memory budget.
    """
    for native in (_client, _server):
        native.set_error_factory(error_of)
    given = {"shard": 0, "host": "127.0.0.1", "port": 0, "memory_budget_bytes": 0, "io_threads": 1, **options}
    engine = ShardEngine(EngineOptions(**given), Registration(cluster_id=1, slot_count=slot_count, lineage=1))
    try:
        yield engine
    finally:
        engine.stop()
