"""The tables of a cluster: what its shards count is summed, and ages are quantiles over all of them."""

from __future__ import annotations

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.status.table_view import RowAgesView, TableView, table_views


def view_of(*usages: pb.TableUsage) -> TableView:
    schema = pb.TableSchema(namespace="n", name="t", id=3, dim=4, optimizer=pb.Optimizer(sgd=pb.Sgd()))
    shards = [pb.ShardStatus(shard=index, tables=[usage]) for index, usage in enumerate(usages)]
    (view,) = table_views(pb.GetStatusReply(tables=[schema], shards=shards))
    return view


def test_counts_of_shards_are_summed() -> None:
    first = pb.TableUsage(table_id=3, rows=30, rows_added=50, rows_evicted=7, refused=2, swept_rows=[1, 2, 3, 4])
    second = pb.TableUsage(table_id=3, rows=10, rows_added=10, rows_evicted=1, refused=1, swept_rows=[0, 0, 10, 0])
    view = view_of(first, second)
    assert (view.rows, view.added, view.evicted, view.refused, view.swept) == (40, 60, 8, 3, 20)
    assert (view.largest_shard, view.rows_skew) == (0, 1.5)
    assert (view.ages_steps, view.ages_seconds) == (None, None)


def test_ages_are_quantiles_over_all_shards() -> None:
    young = pb.TableUsage(table_id=3, ages_steps=[60, 20])
    old = pb.TableUsage(table_id=3, ages_steps=[0, 0, 0, 20], ages_seconds=[0] * 32 + [5])
    view = view_of(young, old)
    assert view.ages_steps is not None
    assert (view.ages_steps.rows, view.ages_steps.p50) == (100, 0)
    assert view.ages_steps.p99 == pytest.approx(3 + 4 * 19 / 20), "ages of three bits are 4 to 7"
    assert view.ages_seconds == RowAgesView(5, pytest.approx(1.5 * 2**31, rel=1e-6), pytest.approx(2**32, rel=0.01))
