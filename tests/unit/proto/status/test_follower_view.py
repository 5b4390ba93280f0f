"""Serving processes as they say of themselves to the shards that they follow."""

from __future__ import annotations

import math

from sparserow.proto import control_pb2 as pb
from sparserow.proto.status.cluster_status import document_of, view_of
from sparserow.proto.status.follower_view import follower_views
from sparserow.proto.status.namespaces import visible_to


def status() -> pb.GetStatusReply:
    reply = pb.GetStatusReply(shards=[pb.ShardStatus(shard=index) for index in range(2)])
    for shard, silent in zip(reply.shards, (0.5, 0.1), strict=True):
        shard.load.following.add(
            cursor="serving/0/1.0/host:7100/ctr@3/ab12", namespace="ads", silent_sec=silent,
            figures=pb.FollowerFigures(
                behind_sec=1 + silent, fresh_p50_sec=0.1, fresh_p99_sec=math.inf, goal_sec=10, aliases="live"
            ),
        )  # fmt: skip
    reply.shards[1].load.following.add(cursor="serving/0/1.0/host:7100/rank@1/cd34", namespace="feed", silent_sec=2.0)
    for behind in (0.5, 7):
        reply.shards[0].load.following.add(cursor="s/x/1", figures=pb.FollowerFigures(shard_behind_sec=behind))
    reply.shards[1].load.following.add(cursor="publish/5", namespace="ads", silent_sec=0.0)
    return reply


def test_a_version_is_shown_once_as_its_newest_call_says() -> None:
    first, second = follower_views(status())
    assert (first.process, first.model, first.shards) == ("serving/0/1.0/host:7100", "ctr@3", 2)
    assert (first.behind_sec, first.fresh_p50_sec, first.silent_sec) == (1.1, 0.1, 0.1)
    assert (first.aliases, first.goal_sec) == ("live", 10)
    assert (second.aliases, second.goal_sec) == ("", None)
    assert (second.model, second.shards, second.behind_sec, second.fresh_p50_sec) == ("rank@1", 1, None, None)
    shards = view_of(None, status(), 0.0).shards
    assert [each.followers_behind_sec for each in shards] == [7, None]
    document = document_of(view_of(None, status(), 0.0))
    assert document["followers"][0]["fresh_p99_sec"] == "beyond"
    assert document["followers"][1]["behind_sec"] is None


def test_a_token_sees_those_of_its_namespaces() -> None:
    assert [each.model for each in follower_views(visible_to(status(), ("feed",)))] == ["rank@1"]
    assert follower_views(visible_to(status(), ())) == ()


def test_a_hundred_times_as_many_followers_as_a_small_cluster_has() -> None:
    reply = pb.GetStatusReply(ready=True)
    for index in range(1000):
        shard = reply.shards.add(shard=index, state=pb.SERVING)
        for replica in range(64):  # as many as a shard shows
            shard.load.following.add(cursor=f"serving/0/1.{replica}/host{replica}:7100/ctr@3/{index}", silent_sec=0.1)
    views = follower_views(reply)
    assert len(views) == 64
    assert {each.shards for each in views} == {1000}
