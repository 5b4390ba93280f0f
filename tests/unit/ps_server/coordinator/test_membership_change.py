"""Operations on a job's members: whom they hold, and whom they only tell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.errors import Unavailable
from sparserow.ps_server.coordinator.procedures.membership_change import JobOperations
from sparserow.ps_server.coordinator.state.cluster import Cluster, ClusterOptions
from sparserow.ps_server.coordinator.state.membership import JobTerms, Ticket
from sparserow.ps_server.coordinator.state.roster import CommitWindow, Roster, WorkerKey
from sparserow.ps_server.coordinator.state.shards import Shard, ShardPhase
from sparserow.ps_server.coordinator.status import status_message

OPTIONS = ClusterOptions(shards=2, slot_count=64)


@dataclass(frozen=True)
class Call:
    """What all shards are asked."""

    name: str
    job_id: int
    operation: int
    fence: Sequence[WorkerKey] = ()
    lease_sec: float = 0.0
    all_or_none: bool = True


class ToldShards:
    """Notes what two shards are asked; they are away when ``away`` is asked."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.away = ""

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    def _note(self, call: Call) -> None:
        if call.name == self.away:
            raise Unavailable("shard 1 cannot be reached")
        self.calls.append(call)

    async def freeze_job(
        self, job_id: int, operation: int, fence: Sequence[WorkerKey], lease_sec: float = 0.0
    ) -> list[dict[WorkerKey, CommitWindow]]:
        self._note(Call("hold", job_id, operation, fence, lease_sec))
        return [{}, {}]

    async def send_job(self, job_id: int, roster: Roster, *, all_or_none: bool = True) -> None:
        self._note(Call("tell", job_id, roster.operation, all_or_none=all_or_none))


def gathered() -> tuple[Cluster, list[Ticket]]:
    cluster = Cluster.create(OPTIONS)
    terms = JobTerms(world_size=2, staleness=2, grad_scale="mean")
    tickets = [cluster.jobs.register("ads", "ctr", rank, terms) for rank in range(2)]
    for ticket in tickets:
        cluster.jobs.admit(ticket, 0.0)
    return cluster, tickets


def settle(cluster: Cluster, shards: ToldShards, job_id: int) -> JobOperations:
    operations = JobOperations(cluster, shards, lambda: None)  # type: ignore[arg-type]
    asyncio.run(operations.settle(job_id))
    return operations


def test_members_that_come_or_go_are_decided_while_the_job_is_held() -> None:
    cluster, tickets = gathered()
    shards = ToldShards()
    operations = settle(cluster, shards, tickets[0].job_id)
    assert shards.names == ["hold", "tell"]
    cluster.jobs.leave_in_order(tickets[1])
    assert operations.unsettled() == [tickets[0].job_id]
    asyncio.run(operations.settle(tickets[0].job_id))
    assert shards.names == ["hold", "tell"] * 2
    assert shards.calls[2].fence == [(tickets[1].worker_id, 1)]
    assert shards.calls[2].lease_sec == 0  # who counts is decided: that cannot lapse
    assert cluster.rosters[tickets[0].job_id].spans[tickets[1].worker_id, 1].until_step is not None


def test_after_a_restart_a_job_whose_members_are_the_same_is_told_and_never_held() -> None:
    cluster, tickets = gathered()
    settle(cluster, ToldShards(), tickets[0].job_id)
    former = Cluster.from_document(
        json.loads(json.dumps(cluster.to_document())), OPTIONS, now=0.0
    )  # its coordinator was killed
    again = ToldShards()
    operations = settle(former, again, tickets[0].job_id)
    assert again.names == ["tell"]
    # A hold that the former one left behind has an older number, so this ends it.
    assert again.calls[0].operation > cluster.operations
    assert operations.unsettled() == []


def test_what_could_not_be_told_is_told_the_next_time() -> None:
    cluster, tickets = gathered()
    settle(cluster, ToldShards(), tickets[0].job_id)
    shards = ToldShards()
    operations = JobOperations(cluster, shards, lambda: None)  # type: ignore[arg-type]
    shards.away = "tell"
    with pytest.raises(Unavailable, match="shard 1"):
        asyncio.run(operations.settle(tickets[0].job_id))
    assert operations.unsettled() == [tickets[0].job_id]
    shards.away = ""
    asyncio.run(operations.settle(tickets[0].job_id))
    assert operations.unsettled() == []
    assert shards.names == ["tell"]


def test_the_generation_that_a_restore_puts_on_the_shards_is_saved_before_it_is_told() -> None:
    cluster, tickets = gathered()
    saved: list[str] = []
    told: list[int] = []

    async def restore() -> None:
        operations = JobOperations(cluster, ToldShards(), lambda: saved.append(json.dumps(cluster.to_document())))  # type: ignore[arg-type]
        await operations.settle(tickets[0].job_id)

        async def load(windows: str) -> None:
            told.append(json.loads(windows)[0]["generation"])
            raise Unavailable("the coordinator is killed here")

        with pytest.raises(Unavailable, match="killed here"):
            await operations.restart(tickets[0].job_id, 10, load)

    asyncio.run(restore())
    after = Cluster.from_document(json.loads(saved[-1]), OPTIONS, now=0.0)
    assert after.jobs.new_generation() > told[0]
    assert cluster.jobs.jobs[tickets[0].job_id].generation < told[0], "the former clock goes on"


def test_who_leaves_while_shards_are_asked_is_a_member_of_that_status() -> None:
    """Whoever reads no member and nobody who leaves knows that what shards lost of it is counted."""
    cluster, tickets = gathered()
    settle(cluster, ToldShards(), tickets[0].job_id)
    shard = cluster.shards.shards[0]
    shard.phase = ShardPhase.SERVING

    class LeavesMeanwhile:
        async def stats(self, _: Shard) -> pb.ShardStatsReply:
            for ticket in tickets:
                cluster.jobs.leave_in_order(ticket)
            return pb.ShardStatsReply(job_steps={tickets[0].job_id: 7})

    def status() -> pb.GetStatusReply:
        return asyncio.run(status_message(cluster, LeavesMeanwhile(), now=0.0))  # type: ignore[arg-type]

    reply = status()
    assert [(len(job.members), job.highest_step) for job in reply.jobs] == [(2, 7)]
    assert reply.leaving == 0
    assert status().leaving == 2
