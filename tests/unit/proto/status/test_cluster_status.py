"""Figures of a cluster from two looks: rates, quantiles, skew, hot keys."""

from __future__ import annotations

import math

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.status.cluster_status import view_of
from sparserow.proto.status.figures import quantile, skew

BOUNDS = [0.001, 0.01, 0.1]


def shard(index: int, *, up: float, requests: int = 0, pulled: int = 0, pulls: tuple[int, ...] = ()) -> pb.ShardStatus:
    load = pb.ShardLoad(up_sec=up, rows_pulled=pulled, time_bounds_sec=BOUNDS)
    if pulls:
        load.times.add(kind="pull", requests=pulls)
    return pb.ShardStatus(shard=index, pid=10 + index, state="SERVING", requests=requests, load=load)


def test_quantiles_lie_in_their_bucket() -> None:
    assert quantile(BOUNDS, [0, 0, 0, 0], 0.5) is None
    assert quantile(BOUNDS, [0, 100, 0, 0], 0.5) == pytest.approx(0.001 + 0.5 * 0.009)
    assert quantile(BOUNDS, [98, 1, 1, 0], 0.98) == pytest.approx(0.001)
    assert quantile(BOUNDS, [98, 1, 1, 0], 0.99) == pytest.approx(0.01)
    assert quantile(BOUNDS, [1, 0, 0, 9], 0.99) == math.inf


def test_skew_is_largest_over_mean() -> None:
    assert skew([10, 10, 10]) == 1
    assert skew([0, 30]) == 2
    assert skew([]) is None
    assert skew([0, 0]) is None


def test_rates_and_times_are_of_the_time_between() -> None:
    before = pb.GetStatusReply(
        shards=[shard(0, up=5, requests=100, pulled=1000, pulls=(1000, 0, 0, 0)), shard(1, up=5)]
    )
    now = pb.GetStatusReply(
        ready=True,
        shards=[
            shard(0, up=7, requests=300, pulled=5000, pulls=(1000, 0, 50, 0)),
            shard(1, up=7, requests=100, pulled=0),
        ],
    )
    view = view_of(before, now, 2.0)
    busy, idle = view.shards
    assert (busy.requests_per_sec, busy.rows_pulled_per_sec) == (100, 2000)
    assert (idle.requests_per_sec, idle.rows_pulled_per_sec) == (50, 0)
    assert busy.times[0].per_sec == 25
    assert busy.p99("pull") == pytest.approx(0.01 + 0.99 * 0.09)
    assert view.skew["requests"] == pytest.approx(100 / 75)
    assert view_of(None, now, 0.0).shards[0].p99("pull") == pytest.approx(0.01 + (0.99 * 1050 - 1000) / 50 * 0.09)
    assert view_of(None, now, 0.0).shards[0].requests_per_sec is None


def test_a_shard_that_was_started_anew_counts_from_its_start() -> None:
    before = pb.GetStatusReply(shards=[shard(0, up=50, requests=1_000_000, pulled=9, pulls=(5, 5, 5, 5))])
    now = pb.GetStatusReply(shards=[shard(0, up=1, requests=40, pulled=20, pulls=(7, 0, 0, 0))])
    view = view_of(before, now, 2.0).shards[0]
    assert (view.requests_per_sec, view.rows_pulled_per_sec) == (20, 10)
    assert view.times[0].per_sec == 3.5


def test_hot_keys_come_by_how_often_they_are_asked_for() -> None:
    def asked(index: int, pulled: int, keys: list[tuple[int, int, int]]) -> pb.ShardStatus:
        status = shard(index, up=3, pulled=pulled)
        status.load.samples = 100
        for key, count, error in keys:
            status.load.hot_keys.add(table_id=7, key=key, count=count, error=error)
        return status

    table = pb.TableSchema(id=7, namespace="ads", name="user")
    now = pb.GetStatusReply(
        tables=[table], shards=[asked(0, 100, [(1, 50, 0), (2, 9, 8)]), asked(1, 900, [(3, 30, 10), (4, 2, 0)])]
    )
    keys = view_of(pb.GetStatusReply(), now, 1.0).hot_keys
    assert [(each.key, each.shard, each.share, each.per_sec) for each in keys] == [
        (3, 1, 0.2, 180),
        (1, 0, 0.5, 50),
        (4, 1, 0.02, 18),
    ]
    assert keys[0].table == "ads/user"


def test_staleness_is_told_in_whole_steps() -> None:
    status = shard(0, up=1)
    usage = status.tables.add(table_id=7)
    for at_most, pulls in ((0, 50), (1, 49), (2**64 - 1, 1)):
        usage.staleness.add(at_most=at_most, pulls=pulls)
    now = pb.GetStatusReply(tables=[pb.TableSchema(id=7, namespace="n", name="t")], shards=[status])
    table = view_of(None, now, 0.0).tables[0]
    assert (table.staleness_p50, table.staleness_p99) == (0, 1)
    now.shards[0].tables[0].staleness[2].pulls = 50
    assert view_of(None, now, 0.0).tables[0].staleness_p99 == math.inf
    assert view_of(None, now, 0.0).as_dict()["tables"][0]["staleness_p99"] == "beyond"
