"""The tables of a cluster, summed over its shards, for screens and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import control_pb2 as pb
from .figures import skew, step_quantile

_LAST_BOUND = 2**64 - 1  # of the bucket of pulls that were staler than all bounds


@dataclass(frozen=True)
class StaleStepsView:
    """Pulls that were at most so many steps stale, and staler than the bucket before.

    Attributes:
        at_most: the steps; infinity in the last bucket.
    """

    at_most: float
    pulls: int


@dataclass(frozen=True)
class TableView:
    """A table.

    Attributes:
        table: the table, as NAMESPACE/NAME.
        dtype, optimizer: the names as in options.
        memory_bytes: the memory of its rows and indexes on all shards.
        ssd_rows, ssd_bytes: the part of its rows that is on SSDs alone.
        refused: the pushes of keys that its policy gave no row for.
        swept: the rows that its policy has removed.
        largest_shard: the shard with most of its rows; None without rows.
        rows_skew: the rows of that shard over the mean of all shards; None without rows.
        staleness: the staleness in steps of its pulls that named a step, since the start.
        staleness_p50, staleness_p99: quantiles of it; None when there was no such pull.
    """

    table: str
    dim: int
    dtype: str
    optimizer: str
    rows: int
    memory_bytes: int
    ssd_rows: int
    ssd_bytes: int
    refused: int
    swept: int
    largest_shard: int | None
    rows_skew: float | None
    staleness: tuple[StaleStepsView, ...]
    staleness_p50: float | None
    staleness_p99: float | None


def table_views(now: pb.GetStatusReply) -> tuple[TableView, ...]:
    """Returns the tables of a status."""
    usages: dict[int, list[tuple[int, pb.TableUsage]]] = {table.id: [] for table in now.tables}
    for shard in now.shards:
        for usage in shard.tables:
            if usage.table_id in usages:
                usages[usage.table_id].append((shard.shard, usage))
    return tuple(_table(table, usages[table.id]) for table in now.tables)


def _table(table: pb.TableSchema, places: Sequence[tuple[int, pb.TableUsage]]) -> TableView:
    pulls: dict[int, int] = {}
    for _, usage in places:
        for bucket in usage.staleness:
            pulls[bucket.at_most] = pulls.get(bucket.at_most, 0) + bucket.pulls
    staleness = tuple(
        StaleStepsView(float("inf") if bound == _LAST_BOUND else float(bound), pulls[bound]) for bound in sorted(pulls)
    )
    bounds, counts = [each.at_most for each in staleness], [each.pulls for each in staleness]
    used = [usage for _, usage in places]
    rows, largest = [usage.rows for usage in used], max(places, key=lambda place: place[1].rows, default=None)
    return TableView(
        table=f"{table.namespace}/{table.name}",
        dim=table.dim,
        dtype=pb.Dtype.Name(table.dtype).lower(),
        optimizer=table.optimizer.WhichOneof("kind") or "",
        rows=sum(rows),
        memory_bytes=sum(usage.total_bytes for usage in used),
        ssd_rows=sum(usage.ssd_rows for usage in used),
        ssd_bytes=sum(usage.ssd_bytes for usage in used),
        refused=sum(usage.refused for usage in used),
        swept=sum(sum(usage.swept_rows) for usage in used),
        largest_shard=None if largest is None or not largest[1].rows else largest[0],
        rows_skew=skew(rows),
        staleness=staleness,
        staleness_p50=step_quantile(bounds, counts, 0.5),
        staleness_p99=step_quantile(bounds, counts, 0.99),
    )
