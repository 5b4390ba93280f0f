"""The tables of a cluster, summed over its shards, for screens and for JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from .. import control_pb2 as pb
from .figures import quantile, skew, step_quantile

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
class RowAgesView:
    """The ages of rows since their last push, as the last sweep of each shard saw them.

    Attributes:
        rows: the rows that it looked at and kept; it passes over those of an SSD that are surely too new to go.
        p50, p99: quantiles of their ages, within a factor of two.
    """

    rows: int
    p50: float
    p99: float


@dataclass(frozen=True)
class TableView:
    """A table.

    Attributes:
        table: the table, as NAMESPACE/NAME.
        dtype, optimizer: the names as in options.
        memory_bytes: the memory of its rows and indexes on all shards.
        ssd_rows, ssd_bytes: the part of its rows that is on SSDs alone.
        added: the rows that it did not have before, by pushes and restores, since its shards started.
        refused: the pushes of keys that its policy gave no row for.
        evicted: the rows that left memory for SSDs.
        swept: the rows that its policy has removed.
        ages_steps, ages_seconds: the ages of its rows in steps and in seconds; None where its policy has no such age,
            and before the first sweep.
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
    added: int
    refused: int
    evicted: int
    swept: int
    ages_steps: RowAgesView | None
    ages_seconds: RowAgesView | None
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
        added=sum(usage.rows_added for usage in used),
        refused=sum(usage.refused for usage in used),
        evicted=sum(usage.rows_evicted for usage in used),
        swept=sum(sum(usage.swept_rows) for usage in used),
        ages_steps=_ages([usage.ages_steps for usage in used]),
        ages_seconds=_ages([usage.ages_seconds for usage in used]),
        largest_shard=None if largest is None or not largest[1].rows else largest[0],
        rows_skew=skew(rows),
        staleness=staleness,
        staleness_p50=step_quantile(bounds, counts, 0.5),
        staleness_p99=step_quantile(bounds, counts, 0.99),
    )


def _ages(counted: Sequence[Sequence[int]]) -> RowAgesView | None:
    """Returns the ages of rows that shards have counted by the bits of their ages."""
    counts = [sum(each) for each in itertools.zip_longest(*counted, fillvalue=0)]
    bounds = [2**bits - 1 for bits in range(len(counts))]
    p50, p99 = (quantile(bounds, [*counts, 0], share) for share in (0.5, 0.99))
    return None if p50 is None or p99 is None else RowAgesView(sum(counts), p50, p99)
