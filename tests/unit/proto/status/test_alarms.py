"""What is wrong, in sentences with the command that mends it; and the part of a status that a token is shown."""

from __future__ import annotations

import math
import time

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.status.alarms import MOST_ALARMS
from sparserow.proto.status.cluster_status import document_of, view_of
from sparserow.proto.status.namespaces import visible_to
from sparserow.ps_server.coordinator.state.damage import Damage

AT = "--coordinator HOST:PORT"


def wrong(reply: pb.GetStatusReply) -> list[tuple[str, str]]:
    return [(each.text, each.mend) for each in view_of(None, reply, 0.0).wrong]


def well() -> pb.GetStatusReply:
    reply = pb.GetStatusReply(ready=True, checkpoint="s3://backup/ads/save-000007")
    for index in range(2):
        reply.shards.add(shard=index, state="SERVING")
    return reply


def test_a_cluster_that_is_well_has_no_alarm() -> None:
    assert wrong(well()) == []


def test_a_lost_shard_is_started_again() -> None:
    reply = well()
    reply.shards[1].state = pb.LOST
    reply.ready, reply.problem = False, "shard 1: its process sends no heartbeat"
    mend = f"sparserow ps {AT} --shard 1"
    assert wrong(reply) == [("not ready: shard 1: its process sends no heartbeat", mend)]


@pytest.mark.parametrize("failure", ["", "shard 1 has no room"])
def test_damage_is_mended_by_a_restore_unless_one_is_under_way(failure: str) -> None:
    reply = well()
    reply.ready, reply.problem = False, Damage("s3://backup/ads/save-000007", {1}, failure).text
    reply.damage = reply.problem
    mend = f"sparserow checkpoint restore s3://backup/ads {AT}" if failure else ""
    assert wrong(reply) == [(f"not ready: {reply.problem}", mend)]


@pytest.mark.parametrize(
    ("figures", "silent", "text"),
    [
        ({"behind_sec": 9.0, "fresh_p99_sec": 9.0}, 0.1, None),
        ({"behind_sec": 12.0, "fresh_p99_sec": 60.0}, 0.1, " has not had all changes for 12 s; goal: 10 s"),
        (
            {"behind_sec": 0.1, "fresh_p99_sec": 14.0},
            0.1,
            ": 1 of 100 changes is served after 14 s; goal: 10 s",
        ),
        (
            {"fresh_p99_sec": math.inf},
            0.1,
            ": 1 of 100 changes is served after over a minute; goal: 10 s",
        ),
        ({"behind_sec": 500.0}, 90.0, None),
    ],
)
def test_a_serving_process_beyond_its_goal_is_named(figures: dict[str, float], silent: float, text: str | None) -> None:
    reply = well()
    reply.shards[0].load.following.add(
        cursor="serving/0/1.0/host;x:7100/ctr@3/ab12",
        silent_sec=silent,
        figures=pb.FollowerFigures(goal_sec=10, **figures),
    )
    mend = f"sparserow status --serving 'host;x:7100' {AT}"
    assert wrong(reply) == ([] if text is None else [(f"ctr@3 at host;x:7100{text}", mend)])
    reply.shards[0].load.following[0].figures.ClearField("goal_sec")
    assert wrong(reply) == []


def test_each_kind_has_its_command_and_the_gravest_stands_first() -> None:
    reply = well()
    reply.security_problem = "cert: it cannot be read"
    reply.shards[0].problem = "security: the previous files stay in force: key: missing"
    reply.shards[1].problem = "shard 1 did not answer in time"
    reply.shards[1].commits_lost, reply.shards[1].losses_unknown = 1200, 2
    reply.shards[1].torn_namespaces.append("ads")
    reply.damaged_checkpoints.extend(["save-000003", "save-000005"])
    reply.faults.add(namespace="ads", job="ctr", rank=3, host="h", pid=7, message="x" * 1000, time=time.time())
    reply.faults.add(namespace="ads", job="ctr", rank=1, message="a later one", time=time.time())
    show, restore = "sparserow security show FILE", f"sparserow checkpoint restore s3://backup/ads {AT}"
    assert wrong(reply) == [
        ("security: the coordinator keeps the previous files: cert: it cannot be read", show),
        ("shard 0: security: the previous files stay in force: key: missing", show),
        ("shard 1: shard 1 did not answer in time", f"sparserow ps {AT} --shard 1"),
        ("shard 1 has lost 1,200 commits, unknown of 2 workers; rows of ads are older here", restore),
        ("damaged checkpoints: save-000003, save-000005", f"sparserow checkpoint save s3://backup/ads {AT}"),
        (
            f"job ads/ctr: rank 3 on h (process 7) has failed: {'x' * 300}…",
            f"sparserow status --faults {AT}",
        ),
    ]


def test_a_folder_that_a_client_has_named_is_one_word_of_a_shell() -> None:
    reply = well()
    reply.checkpoint = "/ckpt/a; reboot $(id)/save-000001"
    reply.damaged_checkpoints.append("save-000001")
    assert wrong(reply)[0][1] == f"sparserow checkpoint save '/ckpt/a; reboot $(id)' {AT}"


def test_an_old_fault_is_no_alarm() -> None:
    reply = well()
    reply.faults.add(namespace="ads", job="ctr", message="m", time=time.time() - 7200)
    assert wrong(reply) == []


def test_their_number_is_bounded() -> None:
    reply = well()
    for index in range(2, 500):
        reply.shards.add(shard=index, state="SERVING", problem="did not answer")
    found = wrong(reply)
    assert len(found) == MOST_ALARMS
    assert found[-1] == (f"{498 - MOST_ALARMS + 1} more things are wrong", f"sparserow status {AT}")


def test_a_token_is_shown_its_namespaces_and_no_name_of_another() -> None:
    reply = well()
    for number, namespace in enumerate(("ads", "feed"), 1):
        reply.tables.add(id=number, namespace=namespace, name="user", dim=4)
        reply.jobs.add(job_id=number, namespace=namespace, name="train")
        reply.faults.add(namespace=namespace, job="train", message=f"of {namespace}", time=time.time())
        for shard in reply.shards:
            shard.tables.add(table_id=number, name=f"{namespace}/user", rows=10 * number)
            shard.load.hot_keys.add(table_id=number, key=number, count=9)
            shard.load.samples = 10
    reply.shards[0].torn_namespaces.extend(["ads", "feed"])
    before = reply.SerializeToString(deterministic=True)
    shown = document_of(view_of(None, visible_to(reply, ["ads"]), 0.0))
    assert "feed" not in repr(shown)
    assert "s3://" not in repr(shown)
    assert shown["checkpoint"] == "save-000007"
    assert [each["table"] for each in shown["tables"]] == ["ads/user"]
    assert [each["rows"] for each in shown["shards"]] == [10, 10]
    assert [each["job"] for each in shown["jobs"]] == ["ads/train"]
    assert shown["shards"][0]["torn_namespaces"] == ["ads"]
    nothing = visible_to(reply, [])
    assert (len(nothing.tables), len(nothing.jobs), len(nothing.faults), len(nothing.shards)) == (0, 0, 0, 2)
    assert visible_to(reply, None) is reply
    assert reply.SerializeToString(deterministic=True) == before, "the status itself is as it was"
